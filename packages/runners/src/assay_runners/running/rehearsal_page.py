"""The page of a rehearsal: its jobs, their sessions, reports and summaries."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from assay.files import write_whole
from assay.report.page.html import render_page
from assay.verdicts import Outcome
from assay_runners.running.machine_job import SessionResult

PAGE_FILE = "index.html"


@dataclass(frozen=True)
class RehearsedJob:
    """A planned job, and the end of its sessions."""

    name: str
    needs: Sequence[str] = ()
    """The jobs that pass before it starts."""
    sessions: Sequence[tuple[SessionResult, str]] = ()
    """Each with its failure; "" for a success. Empty if the job did not start."""
    summary: str = ""
    """The Markdown that GitHub would show."""

    @property
    def outcome(self) -> Outcome | None:
        """FAIL if a session failed; None if the job did not start."""
        if not self.sessions:
            return None
        return judge_session("".join(failure for _, failure in self.sessions))


def judge_session(failure: str) -> Outcome:
    """Return the outcome of a session with this failure."""
    return Outcome.FAIL if failure else Outcome.PASS


def write_page(jobs: Sequence[RehearsedJob], plan: str, exit_code: int, folder: Path) -> Path:
    """Write the page into `folder`, which also has the checkout. plan: the explained plan."""

    def find_pages(session: SessionResult) -> Iterator[tuple[str, str]]:
        """Yield the name of each run and the address of its page."""
        for run in session.runs:
            for page in sorted(run.glob("*.html")):
                yield run.name, page.relative_to(folder).as_posix()

    page = render_page(
        Path(__file__).with_name("rehearsal.html.j2"),
        jobs=jobs,
        plan=plan,
        outcome=judge_session("red" if exit_code else ""),
        judge_session=judge_session,
        find_pages=find_pages,
    )
    return write_whole(folder / PAGE_FILE, page)
