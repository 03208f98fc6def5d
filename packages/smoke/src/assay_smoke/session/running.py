"""Runs the items of a session and collects their results."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from assay.files import write_whole
from assay.runs import Progress
from assay_smoke.session.items import SessionItem
from assay_smoke.session.results import CaseResult, SessionReport
from assay_smoke.session.retries import run_with_retry
from assay_smoke.session.side_by_side import Devices, run_side_by_side

REPORT_FILE = "session.json"


@dataclass
class Session:
    """Runs items in turn, or side by side on disjoint devices."""

    folder: Path
    """Each item has a subfolder."""
    device: str
    """As in a RUN."""
    tell: Callable[[CaseResult, int, int], None]
    """Called with each result, its number and the number of items."""
    devices: Devices | None = None
    """None: items share all devices and run in turn."""
    results: list[CaseResult] = field(default_factory=list)

    def run(self, items: Sequence[SessionItem], progress: Progress) -> None:
        """Run all items. Results so far survive an interruption."""
        for result in self._results_of(items, progress):
            self.results.append(result)
            self.tell(result, len(self.results), len(items))

    def write(self, seconds: float, pairs: tuple[int, int]) -> SessionReport:
        """Write the report. pairs: numbers of pairs of values that met and that are possible."""
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
            yield run_with_retry(item, self.folder, progress)
