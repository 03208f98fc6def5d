"""`assay calibrate`: clean runs of the micro models on the devices of this machine."""

from collections.abc import Sequence
from pathlib import Path

from assay.comparing.limits import CleanRun, largest_ratios
from assay.devices.run_string import Run
from assay.errors import UsageError
from assay.generate.check import capture, check_generate
from assay.generate.processes.requests import GenerateCheck, GoldenRequest
from assay.runs import Progress
from assay.runs.results import VERDICT_FILE, read_measurements
from assay.verdicts import Outcome, Verdict

MODELS = ("micro:llama", "micro:mistral", "micro:gemma2", "micro:mixtral")


def run_clean(
    runs: Sequence[Run], models: Sequence[str], reference: Run, folder: Path, progress: Progress
) -> list[CleanRun]:
    """Check every model on every run, which must be correct, and keep the largest ratios.

    Raises: UsageError if a run has something that cannot be compared, or an exact difference.
    """
    clean = []
    for model in models:
        goldens: dict[str, Path] = {}
        for run in runs:
            name = f"{model} {run}".replace("/", "-").replace(":", "-").replace(" ", "-")
            if run.dtype not in goldens:
                golden = goldens[run.dtype] = folder / f"{name}-golden"
                golden.mkdir()
                request = GoldenRequest(
                    model=model, reference=reference, noise_for=[run.dtype], folder=str(golden)
                )
                capture(request, golden, progress)
            part = folder / name
            part.mkdir()
            check = GenerateCheck(model=model, candidate=run, golden=goldens[run.dtype])
            verdict = check_generate(check, part, progress)
            if not _is_clean(verdict):
                raise UsageError(f"{model} on {run} is not a clean run: see {part / VERDICT_FILE}")
            rows, complaints = read_measurements(part)
            if complaints:
                raise UsageError(f"{part}: {complaints[0]}")
            clean.append(CleanRun(f"{model} {run}", largest_ratios(rows)))
    return clean


def _is_clean(verdict: Verdict) -> bool:
    """Return True if everything agrees that must agree exactly."""
    exact = ("inputs", "tokens", "sampler")
    return (
        not any(item.limit == 0 for item in verdict.suspects)
        and not verdict.unmatched.expected
        and verdict.diagnosis != "non-finite"
        and all(verdict.levels[name].verdict in (None, Outcome.PASS) for name in exact)
    )
