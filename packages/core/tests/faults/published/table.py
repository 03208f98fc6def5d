"""Tables of published bugs, as Markdown."""

from collections.abc import Sequence

from packages.core.tests.faults.published.corpus import published_bugs
from packages.core.tests.faults.published.findings import Finding
from packages.core.tests.trials.tables import markdown_table, number


def findings_table(findings: Sequence[Finding]) -> str:
    """One row for each planted bug and dtype."""
    head = ("bug", "reference", "dtype", "mesh", "found", "place right", "phase", "module or parameter",
            "diagnosis", "ratio", "limit", "resolution", "size", "size as reported", "control",
            "TrainCheck")  # fmt: skip
    return markdown_table(head, [_row(finding) for finding in findings])


def not_planted_table() -> str:
    """One row for each bug that is not planted, with the reason."""
    rows = [
        (name, bug.source, bug.not_planted)
        for name, bug in published_bugs().items()
        if bug.not_planted
    ]
    return markdown_table(("not planted", "reference", "why not"), rows)


def totals(findings: Sequence[Finding]) -> str:
    """How many of each dtype are found, placed and diagnosed, in a sentence each."""
    lines = []
    for dtype in dict.fromkeys(finding.dtype for finding in findings):
        some = [one for one in findings if one.dtype == dtype]
        found = [one for one in some if one.found]
        declared = sum(one.declared for one in some)
        placed, diagnosed = (
            sum(getattr(one, what) for one in some) for what in ("placed", "diagnosed")
        )
        passed = sum(one.control.passed for one in some)
        lines.append(
            f"{dtype}: of {len(some)} published bugs {len(found)} are found, {declared} declared by"
            f" a resolution at or above their size; {placed} at the right place, {diagnosed} with"
            f" the right diagnosis. {passed} of {len(some)} controls pass."
        )
    return "\n".join(lines)


def _row(finding: Finding) -> tuple[str, ...]:
    planted, verdict, location = finding.planted, finding.verdict, finding.verdict.location
    bug = published_bugs()[planted.bug]
    expected = "" if finding.diagnosed or not finding.found else f" ({planted.diagnoses[0]})"
    return (
        planted.bug,
        bug.source,
        finding.dtype,
        planted.training.mesh if planted.training is not None else "",
        _found(finding),
        ("yes" if finding.placed else "no") if finding.found else "",
        location.phase if location is not None else "",
        (location.parameter or location.module or "") if location is not None else "",
        f"{verdict.diagnosis or ''}{expected}",
        number(verdict.noise_ratio),
        number(verdict.limit),
        number(verdict.resolution),
        number(finding.size),
        bug.size,
        finding.control.verdict.value,
        bug.traincheck,
    )


def _found(finding: Finding) -> str:
    if finding.found:
        return "yes"
    return "declared" if finding.declared else "no"
