"""Notes of a verdict on a candidate's steps."""

from assay.training.processes.requests import CandidateReport
from assay.training.processes.skipped_steps import MOST_SKIPPED


def notes_on_steps(report: CandidateReport) -> list[str]:
    """Note the steps that the trainer skipped, and the micro-batches that it runs as one."""
    notes = [
        f"micro-batches {', '.join(map(str, numbers))} of a step are run as one: what the reference has"
        " of each is put together row by row"
        for numbers in report.packed
        if len(numbers) > 1
    ]
    for number, step in enumerate(report.free.steps):
        if step.num_skipped > MOST_SKIPPED:
            notes.append(
                f"step {number} was never made: the trainer skipped it {MOST_SKIPPED} times"
            )
        elif step.num_skipped:
            notes.append(
                f"step {number} was skipped {step.num_skipped} times before it was made, as the"
                " trainer reports: its batch was given again"
            )
    return notes


def notes_on_unmeasured(report: CandidateReport) -> list[str]:
    """Note what the trainer declares unmeasurable, so that every omission is reported."""
    notes = []
    if report.partial_modules:
        names = ", ".join(name or "(model)" for name in report.partial_modules)
        notes = [
            f"no rank has all of {names}: their own code is not measured, what is inside of them is",
            "losses of single micro-batches are not visible",
        ]
    if report.unmeasured:
        declared = ", ".join(report.unmeasured)
        notes.append(f"declared absent, or of no effect; not measured: {declared}")
    return notes
