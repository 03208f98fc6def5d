"""The verdict of a finished run, as text, as HTML, and as files in the run's folder."""

import io
from pathlib import Path

from pydantic import PrivateAttr
from rich.console import Console

from assay.files import DiskError
from assay.output.console import open_text_console
from assay.report.page.html import publish_one, render_first_screen
from assay.report.run_report import Report, read_report
from assay.report.text_formats import print_report
from assay.verdicts import Verdict


class CheckedVerdict(Verdict):
    """The verdict of a finished run, and the run's folder.

    `str(verdict)` is the output of the command line; a notebook shows the report's first screen.
    """

    _report: Report = PrivateAttr()
    _page: Path | None = PrivateAttr(None)
    _unwritten: str = PrivateAttr("")

    @classmethod
    def publish(cls, folder: Path) -> "CheckedVerdict":
        """Write the report's page next to the files of the run in `folder`.

        Returns: the verdict of that run, even if the page cannot be written (`unwritten`).
        Raises: UnreadableFileError if the folder has no verdict.
        """
        report = read_report(folder)
        verdict = cls.model_construct(**dict(report.verdict))
        verdict._report = report  # noqa: SLF001 - its own
        try:
            verdict._page = publish_one(report)  # noqa: SLF001
        except DiskError as error:
            verdict._unwritten = f"{error}; the verdict above is complete"  # noqa: SLF001
        return verdict

    @property
    def unwritten(self) -> str:
        """Return the reason why the report's page could not be written; empty if it was."""
        return self._unwritten

    @property
    def folder(self) -> Path:
        """Return the folder of verdict.json, report.html, the measurements and the golden."""
        return self._report.folder

    def print_to(self, console: Console) -> None:
        """Print the output of the command line."""
        print_report(self._report, console, self._page)

    def __str__(self) -> str:
        text = io.StringIO()
        # In a notebook rich would display the text, and leave the stream empty.
        self.print_to(open_text_console(text))
        return text.getvalue().rstrip("\n")

    def __repr__(self) -> str:
        return f"<{self._report.explanation.title}; {self.folder}>"

    def _repr_html_(self) -> str:
        return render_first_screen(self._report)
