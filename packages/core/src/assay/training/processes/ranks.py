"""Runs the candidate on several ranks. Importing it imports no torch."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.devices.run_string import parse_run
from assay.launch import TimeLimits, World, launch_world
from assay.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from assay.launch import Rank
    from assay.training.processes.requests import TrainerRequest

    RankBody = Callable[[Rank, dict[str, Any]], dict[str, Any]]

# Ranks start once, and train as long as the model needs. No collective of a step takes minutes.
_LIMITS = TimeLimits(start_seconds=300.0, collective_seconds=300.0, body_seconds=86_400.0)


def run_ranks(
    request: "TrainerRequest",
    preload: tuple[str, ...],
    progress: Progress,
    body: "RankBody | None" = None,
) -> list[dict[str, Any]]:
    """Run `body`, by default training with measurements, on every rank; return the reports by rank."""
    folder = Path(request.folder)
    folder.mkdir(parents=True, exist_ok=True)
    world = World(
        request.mesh,
        parse_run(request.candidate).device,
        limits=_LIMITS,
        preload=preload,
        log_folder=folder,
        progress=progress,
    )
    return launch_world(body or _run_rank, world, request.model_dump())


def _run_rank(rank: "Rank", body: dict[str, Any]) -> dict[str, Any]:
    from assay.training.processes.candidate import run_candidate
    from assay.training.processes.requests import TrainerRequest

    request = TrainerRequest.model_validate(body)
    return run_candidate(request, rank.progress, rank).model_dump(mode="json")
