"""How a run ended, in words, where it did not end well."""

from assay.errors import exit_in_words
from assay_smoke.external.running.launches import RunEvidence
from assay_smoke.machine.failures import FULL_DISK


def describe_bad_end(run: RunEvidence) -> str | None:
    """What was wrong with the end of a run, and where it then was; None if nothing was."""
    name, library = run.launch.name, run.launch.library
    if run.hung_in is not None:
        tears_down = run.hung_in == "tear-down"
        limit = library.end_limit_seconds if tears_down else library.time_limit_seconds
        waits = "".join(f"; {place}" for place in run.waits)
        return f"the {name} run hung in {run.hung_in}, {_where(run)}: over {limit:g} s{waits}"
    if not run.exit_code:
        return None
    reason = f"the {name} run {exit_in_words(run.exit_code)} {_where(run)}; {run.last_line}"
    full = next((words for words in FULL_DISK if words in run.last_lines), None)
    return reason if full is None else f"{full}: {reason}"


def is_out_of_disk(reason: str) -> bool:
    """Whether what `describe_bad_end` returned tells of a full disk."""
    return reason.startswith(FULL_DISK)


def steps_made(run: RunEvidence) -> int:
    """How many steps a run is known to have made, those before it was resumed included."""
    return run.launch.first_step + len(run.losses)


def _where(run: RunEvidence) -> str:
    """Where in training a run was when it ended, as far as its losses tell."""
    if not run.losses:
        return "before its first loss"
    return f"after step {steps_made(run)} of {run.launch.library.steps}"
