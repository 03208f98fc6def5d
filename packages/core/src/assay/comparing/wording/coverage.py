"""Coverage in words: one line for the first screen, and notes."""

from collections.abc import Iterable

from assay.errors import name_some
from assay.verdicts import Coverage, is_part_of


def describe_coverage(coverage: Coverage) -> str:
    """What of the model was compared, and what was not, in one line."""
    ran, total = coverage.modules_run, coverage.modules
    text = f"all {total:,}" if ran == total else f"{ran:,} of {total:,}"
    text = f"coverage: {text} modules with parameters ran"
    on_candidate = coverage.candidate_modules_run, coverage.candidate_modules
    if on_candidate == (None, None):
        text += " (the candidate's were not watched)"
    elif on_candidate != (ran, total):
        text += f" (on the candidate {on_candidate[0]:,} of {on_candidate[1]:,})"
    gaps = list_gaps(coverage)
    return "; ".join([text, *gaps, *_list_minor_gaps(coverage)])


def list_gaps(coverage: Coverage) -> list[str]:
    """What was not compared, by kind."""
    parts = [
        f"{path or '(model)'} ({count:,} modules)" if count > 1 else path or "(model)"
        for path, count in coverage.not_run_parts.items()
    ]
    kinds = {
        "never ran": parts,
        "parameters that nothing read": coverage.unused_parameters,
        "experts without a token": coverage.unrouted_experts,
    }
    return [f"{kind}: {name_some(names)}" for kind, names in kinds.items() if names]


def notes_on_coverage(coverage: Coverage) -> list[str]:
    """What --allow-unused excuses, and what it does not need to."""
    notes = []
    excused = sorted(set(coverage.gaps) - set(coverage.forbidden_gaps))
    if excused:
        shown = _in_parts(excused, coverage.not_run_parts)
        notes.append(f"not compared, as --allow-unused allows: {name_some(shown)}")
    notes += [
        f"--allow-unused {glob} covers nothing: all modules, parameters and experts of such a name"
        " were compared, or the model has no such name"
        for glob in coverage.unmatched_globs
    ]
    return notes


def suggest_globs(coverage: Coverage) -> str:
    """The options that would allow what was not compared."""
    shown = _in_parts(coverage.forbidden_gaps, coverage.not_run_parts)
    return " ".join(f"--allow-unused '{name}'" for name in shown[:3]) + (
        " ..." if len(shown) > 3 else ""
    )


def _list_minor_gaps(coverage: Coverage) -> list[str]:
    """What the inputs did not try, and what is no gap in the model."""
    gaps = []
    if coverage.equal_rows:
        names = {port.rpartition(".")[2] for port in coverage.equal_rows}
        gaps.append(f"the rows of {name_some(sorted(names))} never differed")
    unread = coverage.cache_slots - coverage.cache_slots_read
    if unread:
        gaps.append(f"cache slots never read: {unread:,} of {coverage.cache_slots:,}")
    return gaps


def _in_parts(names: Iterable[str], parts: Iterable[str]) -> list[str]:
    """`names`, with those inside of one of `parts` put together."""
    known = list(parts)
    return list(dict.fromkeys(next((p for p in known if is_part_of(n, p)), n) for n in names))
