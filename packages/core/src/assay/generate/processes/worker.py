"""A process of its own for each side: `python -m assay.generate.processes.worker REQUEST`."""

from typing import Any

from assay.runs import Progress
from assay.runs.worker import serve


def work(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Do what `request["kind"]` says with `request["request"]`."""
    from assay.generate.processes import requests
    from assay.generate.processes.candidate import run_candidate
    from assay.generate.processes.equivalence import run_equivalence
    from assay.generate.processes.golden import capture_golden
    from assay.generate.processes.operation_trace import trace_operations
    from assay.plugins import load_object

    body = request["request"]
    match request["kind"]:
        case "setup":
            load_object(body["setup"])
            return {}
        case "capture":
            manifest = capture_golden(requests.CaptureRequest.model_validate(body), progress)
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
