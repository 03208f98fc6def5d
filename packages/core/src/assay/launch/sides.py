"""`ask_side`: have one process, or all ranks of a mesh, do the work of the candidate's side."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TypeVar

from assay.launch.launching import launch_world
from assay.launch.rank import Rank
from assay.launch.world import TimeLimits, World
from assay.progress import Progress
from assay.runs import RemoteFunction, ask
from assay.runs.processes.asking import seconds_left

Request = TypeVar("Request")
Result = TypeVar("Result")

# Ranks start once and work as long as the model needs. No collective takes minutes.
_LIMITS = TimeLimits(start_seconds=300.0, collective_seconds=300.0, body_seconds=86_400.0)


def ask_side(
    function: RemoteFunction[Request, Result],
    request: Request,
    mesh: Mapping[str, int],
    device: str,
    folder: Path,
    *,
    name: str,
    progress: Progress,
) -> list[Result]:
    """Answer `request` in one process, or on every rank of `mesh`. Returns: the results by rank.

    folder: of the side. Logs of ranks go there, the log of one process, called `name`, goes next to it.
    device: as in a RUN.
    Raises: as `ask` and `launch_world`.
    """
    num_ranks = prod(mesh.values())
    if num_ranks == 1:
        return [ask(function, request, folder.parent, name=name, progress=progress)]
    folder.mkdir(parents=True, exist_ok=True)
    axes = ", ".join(f"{axis}={size}" for axis, size in mesh.items())
    with progress.step(f"{name} on {num_ranks} ranks ({axes})"):
        left = seconds_left()
        limits = _LIMITS if left is None else TimeLimits.within(max(1.0, left))
        world = World(
            mesh,
            device,
            limits=limits,
            preload=function.preload,
            log_folder=folder,
            progress=progress,
        )
        return launch_world(answer_on_rank, world, function, request)


def answer_on_rank(
    rank: Rank, function: RemoteFunction[Request, Result], request: Request
) -> Result:
    """Call `function` as a rank of a world."""
    return function.load()(request, rank.progress, rank)
