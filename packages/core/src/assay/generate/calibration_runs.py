"""`assay calibrate`: clean runs of the micro models on the devices of this machine."""

from collections.abc import Sequence
from pathlib import Path

from assay.comparing.calibration import CleanRun, largest_ratios
from assay.errors import UsageError
from assay.generate.check import capture, check_generate
from assay.generate.processes.requests import CaptureRequest, GenerateCheck
from assay.runs import Progress
from assay.runs.results import VERDICT_FILE, read_measurements
from assay.verdicts import Outcome, Verdict

MODELS = ("micro:llama", "micro:mistral", "micro:gemma2", "micro:mixtral")


def run_clean(
    runs: Sequence[str], models: Sequence[str], reference: str, folder: Path, progress: Progress
) -> list[CleanRun]:
    """Check every model on every run, which must be correct, and keep the largest ratios.

    Raises: UsageError if something of a run could not be compared, or differs where it must not.
    """
    clean = []
    for model in models:
        goldens: dict[str, Path] = {}
        for run in runs:
            dtype = run.rpartition("/")[2]
            name = f"{model} {run}".replace("/", "-").replace(":", "-").replace(" ", "-")
            if dtype not in goldens:
                goldens[dtype] = folder / f"{name}-golden"
                goldens[dtype].mkdir()
                request = CaptureRequest(
                    model=model, reference=reference, noise_for=[dtype], folder=str(goldens[dtype])
                )
                capture(request, goldens[dtype], progress)
            part = folder / name
            part.mkdir()
            check = GenerateCheck(model=model, candidate=run, golden=goldens[dtype])
            verdict = check_generate(check, part, progress)
            if not _is_clean(verdict):
                raise UsageError(f"{model} on {run} is no clean run: see {part / VERDICT_FILE}")
            rows, complaints = read_measurements(part)
            if complaints:
                raise UsageError(f"{part}: {complaints[0]}")
            clean.append(CleanRun(f"{model} {run}", largest_ratios(rows)))
    return clean


def _is_clean(verdict: Verdict) -> bool:
    """Whether limits may be taken from a run: all agrees that no limit of noise is needed for."""
    exact = ("inputs", "tokens", "sampler")
    return (
        not any(item.limit == 0 for item in verdict.suspects)
        and not verdict.unmatched.expected
        and verdict.diagnosis != "non-finite"
        and all(verdict.levels[name].verdict in (None, Outcome.PASS) for name in exact)
    )
