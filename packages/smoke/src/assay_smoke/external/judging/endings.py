"""Describes how a run ended."""

from assay.errors import exit_in_words
from assay_smoke.external.running.launch import RunEvidence
from assay_smoke.machine.failures import FULL_DISK


def describe_bad_end(run: RunEvidence) -> str | None:
    """Describe a bad end of a run and its place, or return None for a good end."""
    name, library = run.launch.name, run.launch.library
    if run.hung_in is not None:
        tears_down = run.hung_in == "tear-down"
        limit = library.end_limit_seconds if tears_down else library.time_limit_seconds
        where = f"{run.hung_in}, {_where(run)}"
        return f"the {name} run hung in {where}: over {limit:g} s{describe_waits(run)}"
    if not run.exit_code:
        return None
    reason = f"the {name} run {exit_in_words(run.exit_code)} {_where(run)}; {run.last_line}"
    full = next((words for words in FULL_DISK if words in run.last_lines), None)
    return reason if full is None else f"{full}: {reason}"


def describe_waits(run: RunEvidence) -> str:
    """Describe where the processes of a hung run were, each after a semicolon."""
    return "".join(f"; {place}" for place in run.waits)


def is_out_of_disk(reason: str) -> bool:
    """Return whether `reason`, from `describe_bad_end`, reports a full disk."""
    return reason.startswith(FULL_DISK)


def steps_made(run: RunEvidence) -> int:
    """Return the number of steps that a run has made, including those before its resume."""
    return run.launch.first_step + len(run.losses)


def _where(run: RunEvidence) -> str:
    """Describe the place of the end by the logged losses."""
    if not run.losses:
        return "before its first loss"
    return f"after step {steps_made(run)} of {run.launch.library.steps}"
