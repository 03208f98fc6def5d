"""Pages and summaries are written into the right folders."""

from pathlib import Path

import pytest

from assay.files import DiskError
from assay.report.publish import append_summary, publish_one, publish_several
from assay.report.run_report import Report, read_report
from assay.runs import FolderError
from packages.core.tests.unit.report.sample_runs import Sample, write_sample

SMALL = Sample(1, 2, 18, 2, None)


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return read_report(write_sample(tmp_path / "a run", SMALL))


def test_page_is_written_into_the_folder_of_its_run(report: Report) -> None:
    page = publish_one(report)
    assert page == report.folder / "report.html"
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_page_can_be_drawn_again(report: Report) -> None:
    first = publish_one(report).read_text(encoding="utf-8")
    assert publish_one(report).read_text(encoding="utf-8") == first


def test_another_folder_must_be_new(report: Report, tmp_path: Path) -> None:
    assert publish_one(report, tmp_path / "new").parent == tmp_path / "new"
    with pytest.raises(FolderError):
        publish_one(report, report.folder)


def test_index_links_to_pages_by_relative_paths(report: Report, tmp_path: Path) -> None:
    index = publish_several([report, report], tmp_path / "all")
    assert index == tmp_path / "all" / "index.html"
    assert 'href="../a%20run/report.html"' in index.read_text(encoding="utf-8")
    assert (report.folder / "report.html").is_file()


def test_summary_is_appended(tmp_path: Path) -> None:
    path = tmp_path / "summary.md"
    append_summary(path, "one\n")
    append_summary(path, "two\n")
    assert path.read_text() == "one\ntwo\n"


def test_summary_that_cannot_be_written_is_an_error_of_the_machine(tmp_path: Path) -> None:
    with pytest.raises(DiskError):
        append_summary(tmp_path / "absent" / "summary.md", "text")
