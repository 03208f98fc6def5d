"""The candidate of a generation check on several ranks. Importing it imports no torch."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.devices.run_string import parse_run
from assay.launch import TimeLimits, World, launch_world
from assay.progress import Progress

if TYPE_CHECKING:
    from assay.generate.processes.requests import CandidateRequest
    from assay.launch import Rank

# The one kind of parallelism by which a model is divided while it generates.
AXES = ("tp",)

# As long as a model needs to load and to generate; no collective of a call takes minutes.
_LIMITS = TimeLimits(start_seconds=300.0, collective_seconds=300.0, body_seconds=86_400.0)


def run_ranks(
    request: "CandidateRequest", preload: tuple[str, ...], progress: Progress
) -> list[dict[str, Any]]:
    """Run the candidate on every rank of its mesh; what each rank reports, by rank."""
    folder = Path(request.folder)
    folder.mkdir(parents=True, exist_ok=True)
    device = parse_run(request.candidate).device
    world = World(
        request.mesh, device, limits=_LIMITS, preload=preload, log_folder=folder, progress=progress
    )
    return launch_world(_run_rank, world, request.model_dump())


def _run_rank(rank: "Rank", body: dict[str, Any]) -> dict[str, Any]:
    from assay.generate.processes.candidate import run_candidate
    from assay.generate.processes.requests import CandidateRequest

    request = CandidateRequest.model_validate(body)
    return run_candidate(request, rank.progress, rank).model_dump(mode="json")
