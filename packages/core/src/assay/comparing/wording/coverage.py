"""Wording of coverage: one line for the first screen, and notes."""

from assay.errors import name_some
from assay.verdicts import Coverage


def describe_coverage(coverage: Coverage) -> str:
    """Describe in one line which parts of the model were compared."""
    ran, total = coverage.modules_run, coverage.modules
    text = f"all {total:,}" if ran == total else f"{ran:,} of {total:,}"
    text = f"coverage: {text} modules with parameters ran"
    on_candidate = coverage.candidate_modules_run, coverage.candidate_modules
    if on_candidate == (None, None):
        text += " (the candidate's were not watched)"
    elif on_candidate != (ran, total):
        text += f" (on the candidate {on_candidate[0]:,} of {on_candidate[1]:,})"
    gaps = list_gaps(coverage)
    gaps += ["--allow-unused GLOB passes without them"] if coverage.forbidden_gaps else []
    return "; ".join([text, *gaps, *_list_minor_gaps(coverage)])


def list_gaps(coverage: Coverage) -> list[str]:
    """List the uncompared parts by kind."""
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
    """List the gaps that --allow-unused covers, and its GLOBs that cover no gap."""
    notes = []
    if coverage.gaps and not coverage.forbidden_gaps:
        notes.append(f"not compared, as --allow-unused allows: {'; '.join(list_gaps(coverage))}")
    for glob, nearest in coverage.unmatched_globs.items():
        why = "all parts that it matches were compared, or it matches none"
        if nearest:
            why = f"the model has no such name; the nearest are {name_some(nearest)}"
        notes.append(f"--allow-unused {glob} covers nothing: {why}")
    return notes


def _list_minor_gaps(coverage: Coverage) -> list[str]:
    """List parts that the inputs did not exercise and that do not count as gaps."""
    gaps = []
    if coverage.equal_rows:
        names = {port.rpartition(".")[2] for port in coverage.equal_rows}
        gaps.append(f"the rows of {name_some(sorted(names))} never differed")
    unread = coverage.cache_slots - coverage.cache_slots_read
    if unread:
        gaps.append(f"cache slots never read: {unread:,} of {coverage.cache_slots:,}")
    return gaps
