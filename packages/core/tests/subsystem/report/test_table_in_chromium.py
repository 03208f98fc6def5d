"""The table of measurements in a real browser."""

import math
import time
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from assay.judge.wording import format_number
from assay.report.page.html import publish_one
from assay.report.page.tables import draw_table
from assay.report.run_report import Report, read_report
from assay.verdicts import Measurement, Outcome, Verdict
from packages.core.tests.subsystem.report.opened_pages import (
    FAULTY,
    MAX_BYTES,
    Chromium,
    middle_of,
    tip_at,
)
from packages.core.tests.unit.report.sample_runs import Sample, write_sample


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sample = Sample(15, 5, 80, 20, "model.layers.7.mlp.down_proj")  # 201 modules, 500 tokens
    return publish_one(read_report(write_sample(tmp_path_factory.mktemp("large"), sample)))


def cells_of(page: Page, title: str) -> Locator:
    """Return the cells of the column with this title."""
    titles = [text.split()[0] for text in page.locator("#table th").all_inner_texts()]
    return page.locator(f"#table tbody tr:not(.spacer) td:nth-child({titles.index(title) + 1})")


@pytest.mark.long
def test_large_run_is_small_and_quick(chromium: Chromium, large: Path) -> None:
    assert large.stat().st_size < MAX_BYTES
    seconds = []
    for _ in range(3):  # other processes delay single ones
        began = time.perf_counter()
        chromium.open(large)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 3
    opened = chromium.open(large)
    lines = tip_at(opened.page, *middle_of(opened.page, "#worst-cell"))
    assert lines[:3] == [
        "model.layers.7.mlp.down_proj",
        "prompt 1, token 17",
        "91.0x the noise of this row",
    ]
    assert "100,000 of 102,306 measurements are listed" in opened.page.locator("main").inner_text()
    assert opened.complaints == []


@pytest.mark.long
def test_table_of_100_000_rows_sorts_and_filters_without_freezing(
    chromium: Chromium, large: Path
) -> None:
    page = chromium.open(large).page
    sort = (
        "number => { const began = performance.now();"
        "document.querySelectorAll('#table th button')[number].click();"
        "return performance.now() - began; }"
    )
    columns = page.locator("#table th").count()
    sorting = [page.evaluate(sort, number) for number in range(columns) for _ in range(2)]
    assert page.locator("#table th[aria-sort=ascending]").count() == 1
    filtering = page.evaluate(
        "() => { const filter = document.getElementById('filter');"
        "return ['layers.7.', 'layers.7.mlp.down', 'token', ''].map((text) => {"
        "const began = performance.now(); filter.value = text;"
        "filter.dispatchEvent(new Event('input')); return performance.now() - began; }); }"
    )
    print(f"sorting: {max(sorting):.0f} ms at most, filtering: {max(filtering):.0f} ms")  # noqa: T201
    assert max(sorting) < 500
    assert max(filtering) < 500


@pytest.mark.long
def test_table_scrolls_through_all_of_its_rows(chromium: Chromium, large: Path) -> None:
    page = chromium.open(large).page
    table = page.locator("#table")
    table.scroll_into_view_if_needed()
    assert page.locator("#filter-count").inner_text() == "100,000 rows"
    assert table.locator("tbody tr").count() < 100
    table.evaluate("element => { element.scrollTop = element.scrollHeight; }")
    lowest = draw_table(read_report(large.parent)).rows[-1]
    expect(cells_of(page, "module").last).to_have_text(lowest.module)
    expect(cells_of(page, "ratio").last).to_have_text(format_number(lowest.ratio))


def test_table_of_more_tokens_than_16_bits_name_shows_the_last(
    chromium: Chromium, tmp_path: Path
) -> None:
    count = (1 << 16) + 10
    rows = [
        Measurement(
            level="logits", module="", port="logits", statistic="kl", prompt=0, position=number,
            actual=1.0, expected=1.0, ratio=float(count - number),
        )
        for number in range(count)
    ]  # fmt: skip
    page = chromium.open(publish_one(Report(tmp_path, Verdict(verdict=Outcome.PASS), rows))).page
    page.locator("#table").evaluate("element => { element.scrollTop = element.scrollHeight; }")
    expect(cells_of(page, "token").last).to_have_text(str(count - 1))
    assert page.locator("#filter-count").inner_text() == f"{count:,} rows"


def test_table_is_sorted_and_filtered(chromium: Chromium, failed: Path) -> None:
    page = chromium.open(failed).page
    page.locator("#filter").fill("replay-slope")
    assert page.locator("#filter-count").inner_text() == "58 rows"
    first = cells_of(page, "module").first
    assert first.inner_text() == FAULTY
    page.get_by_role("button", name="module").click()
    assert first.inner_text() == "(model)"
    page.get_by_role("button", name="module").click()
    assert first.inner_text() == "model.rotary_emb"


NUMBERS = [
    0.0, 1e-29, 4.1e-2, 0.0999, 0.09999, 0.1, 0.5, 1.0, 3.0, 1.364, 9.995, 10.0, 14.62, 99.96,
    100.0, 518.4, 9994.0, 9999.0, 1.234e6, -0.25, -3e-5, math.inf, -math.inf, math.nan,
]  # fmt: skip


def test_page_shows_numbers_like_all_other_formats(chromium: Chromium, tmp_path: Path) -> None:
    rows = [
        Measurement(
            level="logits",
            module=str(number),
            port="output",
            statistic="max-abs",
            actual=value,
            expected=1.0,
            ratio=1.0,
        )
        for number, value in enumerate(NUMBERS)
    ]
    path = publish_one(Report(tmp_path, Verdict(verdict=Outcome.PASS), rows))
    cells = cells_of(chromium.open(path).page, "candidate")
    assert cells.all_inner_texts() == [format_number(value) for value in NUMBERS]
