"""Evidence of other libraries, with the verdict of `assay compare EXPECTED ACTUAL`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from assay.comparison.check import CompareOptions, compare_dumps
from assay.dumps.recognizing import open_dump
from assay.runs import SilentProgress
from assay.verdicts import Outcome, Verdict
from packages.core.tests.trials.kept import kept_if_asked
from packages.core.tests.trials.tables import markdown_table, number

CLEAN = "clean"


@dataclass(frozen=True)
class Judged:
    """A trace or a folder, and the verdict on it."""

    library: str
    model: str
    fault: str
    modules: tuple[str, ...]
    """The wrong modules, of which one must be named."""
    verdict: Verdict

    @property
    def name(self) -> str:
        """Return the name of the evidence."""
        return f"{self.library}-{self.model}-{self.fault}"

    @property
    def is_located(self) -> bool:
        """Return True if the verdict fails at a wrong weight."""
        found = self.verdict.location
        return (
            self.verdict.verdict is Outcome.FAIL
            and found is not None
            and found.module in self.modules
        )


def compare(expected: Path, actual: Path) -> Verdict:
    """Compare two dumps or model folders."""
    return kept_if_asked(_compare)((expected, actual))


def _compare(folders: tuple[Path, Path]) -> Verdict:
    expected, actual = folders
    comparison = CompareOptions(str(expected), str(actual))
    return compare_dumps(
        comparison, open_dump(expected), open_dump(actual), SilentProgress()
    ).verdict


def judged_table(judged: Sequence[Judged]) -> str:
    """One row for each piece of evidence, as Markdown."""
    head = ("library", "model", "fault", "verdict", "location", "ratio", "limit", "compared")
    rows = []
    for one in judged:
        verdict = one.verdict
        location = (verdict.location.module or "(model)") if verdict.location else ""
        rows.append((
            one.library, one.model, one.fault, verdict.verdict.value, location,
            number(verdict.noise_ratio), number(verdict.limit), str(verdict.compared),
        ))  # fmt: skip
    return markdown_table(head, rows)
