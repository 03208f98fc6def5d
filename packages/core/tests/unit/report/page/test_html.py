"""The page of a run, and the files and folders of pages and summaries."""

import hashlib
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from assay.files import DiskError
from assay.report.page import html
from assay.report.page.html import (
    MAX_PAGE_BYTES,
    append_summary,
    publish_one,
    render_html,
    render_index,
    write_index,
)
from assay.report.run_report import Report, read_report
from assay.runs import FolderError
from assay.verdicts import Level, Measurement, Outcome, Verdict
from packages.core.tests.unit.report.sample_runs import Sample, write_hostile_sample, write_sample

HOSTILE = "</script><script>hacked = 1</script><img src=x onerror='hacked = 1'>{{ 7 * 7 }}\"&"


class Elements(HTMLParser):
    """Collects the start tags of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return read_report(write_sample(tmp_path_factory.mktemp("run"), Sample()))


def test_verdict_comes_first(failed: Report) -> None:
    main = render_html(failed).partition("<main>")[2]
    text = " ".join(re.sub(r"<[^>]*>", " ", main).split())
    assert text.startswith(
        "✗ FAIL micro:llama on cpu/bfloat16 against cpu/float32 "
        "model.layers.2.mlp.down_proj (forward, step 0) differs from the reference."
    )


def test_training_steps_are_a_section_of_their_own(failed: Report) -> None:
    def row(statistic: str, actual: float, **facts: Any) -> Measurement:
        place = {"level": "loss", "module": "", "port": "free-run"}
        return Measurement(
            **place, statistic=statistic, actual=actual, expected=2.0, ratio=actual, **facts
        )

    steps = [row("candidate-loss", 4.0), row("loss-error", 7.0, limit=5.0)]
    page = render_html(replace(failed, measurements=steps))

    section = page.partition('<section aria-labelledby="curves">')[2].partition("</section>")[0]
    assert re.findall(r"<h3[^>]*>(.*?)</h3>", section) == ["Loss"]
    assert '<tr class="judged over"><td>judged</td>' in section
    assert "<td>7.0x / 5.0x</td>" in section
    assert 'aria-labelledby="curves"' not in render_html(failed)


def test_every_section_is_there(failed: Report) -> None:
    headings = re.findall(r"<h2[^>]*>(.*?)</h2>", render_html(failed))
    assert headings == [
        "Tokens by modules", "Levels",
        "Modules", "Error along the depth", "KL divergence of each token",
        "Suspects", "Measurements", "Where it ran", "To repeat it",
    ]  # fmt: skip


def test_page_names_no_other_file(failed: Report) -> None:
    elements = Elements(render_html(failed)).found
    assert len(elements) > 100
    names = [name for _, attributes in elements for name in attributes]
    assert not {"src", "href", "srcset", "data", "action"} & set(names)
    assert not {"link", "iframe", "img", "object"} & {tag for tag, _ in elements}
    assert "url(" not in render_html(failed)


def test_only_our_own_script_may_run(failed: Report) -> None:
    elements = Elements(render_html(failed)).found
    policy = next(a["content"] for tag, a in elements if tag == "meta" and "http-equiv" in a)
    assert policy is not None
    assert re.search(r"default-src 'none'.*script-src 'sha256-[A-Za-z0-9+/]{43}='", policy)


def test_names_of_a_run_never_become_elements(tmp_path: Path) -> None:
    clean = Elements(
        render_html(read_report(write_hostile_sample(tmp_path / "clean", "harmless"))),
    )
    hostile = Elements(
        render_html(read_report(write_hostile_sample(tmp_path / "hostile", HOSTILE))),
    )
    assert [tag for tag, _ in hostile.found] == [tag for tag, _ in clean.found]
    assert [sorted(a) for _, a in hostile.found] == [sorted(a) for _, a in clean.found]


def test_run_without_measurements_has_no_pictures() -> None:
    verdict = Verdict(verdict=Outcome.PASS, levels={"tokens": Level(verdict=Outcome.PASS)})
    page = render_html(Report(Path("run"), verdict))
    assert re.findall(r"<h2[^>]*>(.*?)</h2>", page) == ["Levels", "Where it ran"]


def test_page_of_a_large_run_fits_and_states_what_is_left_out() -> None:
    rows = [
        Measurement(
            level="modules",
            module=f"model.layers.{stage}",
            port="output",
            order=stage,
            statistic="token",
            prompt=0,
            position=position,
            actual=0.01,
            expected=0.01,
            ratio=1.0 + stage / 1000,
        )
        for stage in range(100)
        for position in range(1100)
    ]
    page = render_html(Report(Path("run"), Verdict(verdict=Outcome.PASS), rows))
    assert len(page.encode()) < MAX_PAGE_BYTES
    assert "100,000 of 110,000 measurements are listed" in page


def test_long_names_do_not_make_a_page_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        Measurement(
            level="logits",
            module=hashlib.sha512(bytes([number % 256, number // 256])).hexdigest(),
            port="output",
            statistic="max-abs",
            actual=1.0,
            expected=1.0,
            ratio=1.0,
        )
        for number in range(2000)
    ]
    monkeypatch.setattr(html, "MAX_ROWS", 2000)
    monkeypatch.setattr(html, "MAX_PAGE_BYTES", 150_000)
    page = render_html(Report(Path("run"), Verdict(verdict=Outcome.PASS), rows))
    assert len(page.encode()) < 150_000
    assert "1,000 of 2,000 measurements are listed" in page


def test_tiles_name_what_was_counted() -> None:
    verdict = Verdict(verdict=Outcome.PASS, compared=5, compared_unit="items", resolution=0.0)
    page = render_html(Report(Path("run"), verdict))
    assert '<dd>5</dd><dd class="muted">items</dd>' in page
    assert "resolution" not in page.partition("</header>")[0].partition("<header")[2]


def test_values_that_must_be_equal_have_no_ratio() -> None:
    exact = {"statistic": "exact", "noise_ratio": math.inf, "limit": 0.0, "resolution": 0.0}
    verdict = Verdict(verdict=Outcome.FAIL, compared=5, headline="It differs.", **exact)
    tiles = render_html(Report(Path("run"), verdict)).partition("</header>")[0].partition("<dl")[2]
    assert "<dt>limit</dt><dd>must be equal</dd>" in tiles
    assert "inf" not in tiles
    assert "resolution" not in tiles


def test_index_holds_every_run_and_leads_to_its_page(failed: Report) -> None:
    passed = Report(Path("other"), Verdict(verdict=Outcome.PASS, compared=1))
    page = render_index([failed, passed], {failed.folder: "../run/report.html"})
    assert "<title>1 FAIL, 1 PASS</title>" in page
    level = Level(verdict=Outcome.NOT_COMPARED, reason="nothing was compared")
    unknown = Report(Path("unknown"), Verdict(verdict=level.verdict, levels={"logits": level}))
    assert "<td>logits: nothing was compared</td>" in render_index([unknown], {})
    links = [a["href"] for tag, a in Elements(page).found if tag == "a"]
    assert links == ["#run-1", "../run/report.html", "#run-2"]


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
    (tmp_path / "all").mkdir()
    index = write_index([report, report], tmp_path / "all")
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


def test_a_summary_over_githubs_limit_is_cut_with_a_note(tmp_path: Path) -> None:
    file = tmp_path / "summary"
    for text in ("first\n", "ü" * 600_000, "last"):
        append_summary(file, text)
    assert file.stat().st_size < 1024 * 1024
    read = file.read_text(encoding="utf-8", errors="replace")
    assert read.startswith("first\nüüü")
    assert "the rest is in the artifacts" in read
