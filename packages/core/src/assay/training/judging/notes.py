"""Notes of a verdict on a candidate's steps."""

from assay.training.processes.skipped_steps import MOST_SKIPPED
from assay.training.processes.trainer_report import TrainerReport


def notes_on_steps(report: TrainerReport) -> list[str]:
    """Note skipped steps, and micro-batches that run as one."""
    notes = [
        f"micro-batches {', '.join(map(str, numbers))} of a step are run as one: what the reference has"
        " of each is put together row by row"
        for numbers in report.replay.packed
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


def notes_on_unmeasured(report: TrainerReport) -> list[str]:
    """Note declared parts that are not measured, so that every omission is reported."""
    notes = []
    if report.traits.partial_modules:
        names = ", ".join(name or "(model)" for name in report.traits.partial_modules)
        notes = [
            f"no rank has all of {names}: their own code is not measured, what is inside of them is",
            "losses of single micro-batches are not visible",
        ]
    if report.traits.unmeasured:
        declared = ", ".join(report.traits.unmeasured)
        notes.append(f"declared absent, or of no effect; not measured: {declared}")
    return notes
