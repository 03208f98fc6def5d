"""A session: every item run, and its result written down at once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from assay.files import write_whole
from assay.runs import Progress
from assay_smoke.session.items import SessionItem
from assay_smoke.session.results import CaseResult, SessionReport
from assay_smoke.session.side_by_side import Devices, run_side_by_side
from assay_smoke.session.trying import try_item

REPORT_FILE = "session.json"


@dataclass
class Session:
    """Runs items: one after the other, or on disjoint devices where there are several.

    folder: of the session; each item has one of its own below it.
    device: as in a RUN; devices: None where all items share what there is.
    tell: called with every result, as soon as it is there.
    """

    folder: Path
    device: str
    tell: Callable[[CaseResult, int, int], None]
    devices: Devices | None = None
    results: list[CaseResult] = field(default_factory=list)

    def run(self, items: Sequence[SessionItem], progress: Progress) -> None:
        """Run all. After an interruption the results so far can be written."""
        for result in self._results_of(items, progress):
            self.results.append(result)
            self.tell(result, len(self.results), len(items))

    def write(self, seconds: float, pairs: tuple[int, int]) -> SessionReport:
        """Write the report of what has run; pairs: how many values meet, of how many that can."""
        report = SessionReport(
            schema=1,
            device=self.device,
            cases=self.results,
            seconds=seconds,
            pairs_covered=pairs[0],
            pairs_possible=pairs[1],
        )
        write_whole(self.folder / REPORT_FILE, report.model_dump_json(by_alias=True, indent=1))
        return report

    def _results_of(self, items: Sequence[SessionItem], progress: Progress) -> Iterator[CaseResult]:
        if self.devices is not None and len(items) > 1:
            yield from run_side_by_side(items, self.devices, self.folder, progress)
            return
        for item in items:
            yield try_item(item, self.folder, progress)
