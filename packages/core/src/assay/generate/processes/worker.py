"""The processes of a generation check, and their entry point. Importing it imports no torch."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from assay.launch import TimeLimits, World, launch_world
from assay.runs import Answer, Progress, run_process
from assay.runs.worker import serve

if TYPE_CHECKING:
    from assay.generate.processes.requests import CandidateRequest
    from assay.launch import Rank
    from assay.verdicts import Record

# A candidate that generates supports tensor parallelism only.
AXES = ("tp",)

# The fork server imports this once; all processes of a check are forked from it.
PRELOAD = ("assay.generate.processes.preload",)

# Loading and generation may take hours; no collective of a call takes minutes.
_LIMITS = TimeLimits(start_seconds=300.0, collective_seconds=300.0, body_seconds=86_400.0)


def ask(
    kind: Literal["setup", "capture", "candidate", "operations", "equivalence"],
    request: "Record",
    name: str,
    folder: Path,
    progress: Progress,
) -> Answer:
    """Answer `request` in a new process called `name`, whose log goes to `folder`.

    Raises: as `run_process`.
    """
    return run_process(
        "assay.generate.processes.worker",
        {"kind": kind, "request": request.model_dump()},
        folder,
        name=name,
        progress=progress,
        preload=PRELOAD,
    )


def run_ranks(request: "CandidateRequest", progress: Progress) -> list[dict[str, Any]]:
    """Run the candidate on every rank of its mesh. Returns: the reports, by rank."""
    folder = Path(request.folder)
    folder.mkdir(parents=True, exist_ok=True)
    device = request.candidate.device
    world = World(
        request.mesh, device, limits=_LIMITS, preload=PRELOAD, log_folder=folder, progress=progress
    )
    return launch_world(_run_rank, world, request.model_dump())


def _run_rank(rank: "Rank", body: dict[str, Any]) -> dict[str, Any]:
    from assay.generate.processes.candidate import run_candidate
    from assay.generate.processes.requests import CandidateRequest

    request = CandidateRequest.model_validate(body)
    return run_candidate(request, rank.progress, rank).model_dump(mode="json")


def work(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Answer a request of `ask`."""
    from assay.generate.processes import requests
    from assay.generate.processes.candidate import run_candidate
    from assay.generate.processes.equivalence import run_equivalence
    from assay.generate.processes.golden import capture_golden
    from assay.generate.processes.operation_trace import trace_operations
    from assay.plugins import load_object

    body = request["request"]
    match request["kind"]:
        case "setup":
            load_object(requests.SetupRequest.model_validate(body).setup)
            return {}
        case "capture":
            manifest = capture_golden(requests.GoldenRequest.model_validate(body), progress)
            return manifest.model_dump(mode="json", by_alias=True)
        case "candidate":
            report = run_candidate(requests.CandidateRequest.model_validate(body), progress)
            return report.model_dump(mode="json")
        case "operations":
            return trace_operations(requests.OperationsRequest.model_validate(body), progress)
        case "equivalence":
            return run_equivalence(requests.EquivalenceRequest.model_validate(body), progress)
        case kind:
            raise ValueError(f"no work of kind {kind!r}")


if __name__ == "__main__":
    serve(work)
