"""The HTML report in a real browser: opened from disk, without a network."""

import math
import time
from pathlib import Path
from typing import Any, Protocol

import pytest
from playwright.sync_api import Page, expect

from assay.comparing.wording.numerals import format_number
from assay.report.page.html import render_first_screen
from assay.report.page.table import draw_table
from assay.report.publish import publish_one, publish_several
from assay.report.run_report import Report, read_report
from assay.verdicts import Measurement, Outcome, Verdict
from packages.core.tests.unit.offline.small_dumps import double_scale, judge, write
from packages.core.tests.unit.report.sample_runs import Sample, write_hostile_sample, write_sample

FAULTY = "model.layers.2.mlp.down_proj"
FAULTY_LINE = 4 + 2 * 13 + 12  # model, embedding and so on; two layers; last of the third
MAX_BYTES = 7_000_000
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='hacked = 1'>\"&"


class OpenedPage(Protocol):
    page: Page
    complaints: list[str]
    requests: list[str]


class Chromium(Protocol):
    def open(self, path: Path, *, width: int = 1280, dark: bool = False) -> OpenedPage: ...


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_sample(tmp_path_factory.mktemp("failed"), Sample(faulty_module=FAULTY))
    return publish_one(read_report(folder))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sample = Sample(15, 5, 80, 20, "model.layers.7.mlp.down_proj")  # 201 modules, 500 tokens
    return publish_one(read_report(write_sample(tmp_path_factory.mktemp("large"), sample)))


def tip_at(page: Page, x: float, y: float) -> list[str]:
    page.mouse.move(x, y)
    return page.locator("#tip").inner_text().splitlines()


def middle_of(page: Page, selector: str) -> tuple[float, float]:
    found = page.locator(selector)
    found.scroll_into_view_if_needed()
    box = found.bounding_box()
    assert box is not None
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def colour_of(page: Page, line: int, column: int) -> list[int]:
    colour: list[int] = page.evaluate(
        "([x, y]) => [...document.querySelector('#heat-map canvas')"
        ".getContext('2d').getImageData(x, y, 1, 1).data]",
        [column, line],
    )
    return colour


def is_wider_than_its_window(page: Page) -> bool:
    wider: bool = page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
    return wider


def test_page_opens_from_disk_without_requests_or_errors(chromium: Chromium, failed: Path) -> None:
    opened = chromium.open(failed)
    assert opened.page.locator("h1").inner_text().startswith("✗ FAIL")
    assert opened.requests == [failed.as_uri()]
    assert opened.complaints == []
    assert failed.stat().st_size < MAX_BYTES


def test_worst_cell_of_the_heat_map_is_the_planted_fault(chromium: Chromium, failed: Path) -> None:
    page = chromium.open(failed).page
    faulty = page.evaluate("JSON.parse(document.getElementById('data').textContent).heatMap")
    num_stages, num_columns = len(faulty["stages"]), len(faulty["columns"])
    assert (num_stages, num_columns) == (58, 128)
    size = page.evaluate("(c => [c.height, c.width])(document.querySelector('#heat-map canvas'))")
    assert size == [num_stages, num_columns]
    planted = read_report(failed.parent)
    worst = next(
        row
        for row in planted.measurements
        if (row.statistic, row.module, row.prompt, row.position) == ("token", FAULTY, 1, 17)
    )
    assert tip_at(page, *middle_of(page, "#worst-cell")) == [
        FAULTY,
        "prompt 1, token 17",
        "91.0x the noise of this row",
        f"candidate {format_number(worst.actual)}, noise {format_number(worst.expected)}",
        "output",
    ]


def test_line_of_the_fault_is_marked_and_in_view(chromium: Chromium, failed: Path) -> None:
    page = chromium.open(failed).page
    assert page.locator("#heat-map .located").inner_text() == FAULTY
    inside = page.evaluate(
        "(() => { const line = document.querySelector('#heat-map .located').getBoundingClientRect();"
        "const map = document.getElementById('heat-map').getBoundingClientRect();"
        "return line.top >= map.top && line.bottom <= map.bottom; })()"
    )
    assert inside is True


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_worst_cell_has_the_strongest_colour(
    chromium: Chromium, failed: Path, *, dark: bool
) -> None:
    page = chromium.open(failed, dark=dark).page
    line, column = FAULTY_LINE, 32 + 17  # prompt 1, token 17; a prompt has 32
    assert page.locator("#heat-map .labels div").nth(line).inner_text() == FAULTY
    strongest = [255, 248, 214, 255] if dark else [23, 7, 34, 255]
    assert colour_of(page, line, column) == strongest
    assert colour_of(page, line - 1, column) != strongest


def test_clean_run_has_no_strong_colour(chromium: Chromium, tmp_path: Path) -> None:
    folder = write_sample(tmp_path, Sample(faulty_module=None))
    opened = chromium.open(publish_one(read_report(folder)))
    assert opened.page.locator("h1").inner_text().startswith("✓ PASS")
    assert opened.page.locator("#heat-map .located").count() == 0
    # Green falls along the ramp and is 40 at two thirds of it, the ratio 10 ** (2 / 3) = 4.6.
    strong: int = opened.page.evaluate(
        "(c => { const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "let n = 0; for (let i = 0; i < d.length; i += 4) n += d[i + 1] < 40; return n; })"
        "(document.querySelector('#heat-map canvas'))"
    )
    assert strong == 0
    assert opened.complaints == []


def test_colours_follow_the_logarithm_and_nan_has_its_own(
    chromium: Chromium, tmp_path: Path
) -> None:
    rows = [
        Measurement(
            level="modules",
            module=module,
            port="output",
            order=order,
            statistic="token",
            prompt=0,
            position=position,
            actual=math.nan if broken else 0.01,
            expected=0.01,
            ratio=math.nan if broken else {3: 1.78}.get(position, 1.0),
        )
        for order, module in enumerate(("a", "b"))
        for position in range(4)
        if (broken := (module, position) == ("b", 2)) or (module, position) != ("a", 1)
    ]
    report = Report(tmp_path, Verdict(verdict=Outcome.FAIL), rows)
    page = chromium.open(publish_one(report)).page
    assert colour_of(page, 1, 2) == [0, 160, 138, 255]
    assert colour_of(page, 0, 0) == [241, 244, 248, 255]
    # log10(1.78) of six steps is 1.5: half way from the second colour to the third.
    assert colour_of(page, 0, 3) == [237, 201, 144, 255]
    assert colour_of(page, 0, 1) == [0, 0, 0, 0]  # not compared: what lies below shows through
    assert tip_at(page, *middle_of(page, "#worst-cell")) == [
        "b",
        "prompt 0, token 2",
        "not finite",
        "candidate nan, noise 1e-2",
        "output",
    ]


def test_cells_are_read_with_the_keyboard(chromium: Chromium, failed: Path) -> None:
    page = chromium.open(failed).page
    page.locator("#heat-map").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowUp")
    lines = page.locator("#tip").inner_text().splitlines()
    assert lines[:2] == ["model.layers.2.mlp.act_fn", "prompt 1, token 18"]
    page.keyboard.press("Tab")
    assert page.locator("#tip").is_hidden()


def test_curves_show_their_values_under_the_pointer(chromium: Chromium, failed: Path) -> None:
    page = chromium.open(failed).page
    plot = page.locator("[data-chart=depth] .plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    place = box["x"] + box["width"] * (FAULTY_LINE + 0.5) / 58
    lines = tip_at(page, place, box["y"] + 10)
    assert lines[0] == FAULTY
    assert lines[3:] == ["replayed, candidate: 4.09e-2", "replayed, noise: 2.8e-3"]
    assert page.locator("[data-chart=kl] .plot svg").count() == 1


def test_losses_of_overfitting_are_drawn_with_their_target(
    chromium: Chromium, tmp_path: Path
) -> None:
    def loss(statistic: str, step: int, actual: float, expected: float) -> Measurement:
        return Measurement(
            level="overfit", module="", port="loss", statistic=statistic, step=step,
            actual=actual, expected=expected, ratio=actual / expected,
        )  # fmt: skip

    rows = [loss("candidate-loss", step, 4.0 - step, 3.9 - step) for step in range(4)]
    rows += [loss("noise-loss", step, 4.1 - step, 3.9 - step) for step in range(4)]
    rows.append(loss("overfit-loss", 3, 2.5, 0.5))
    verdict = Verdict(verdict=Outcome.FAIL, noise_ratio=5.0, limit=1.0, statistic="overfit-loss")
    opened = chromium.open(publish_one(Report(tmp_path, verdict, rows)))
    plot = opened.page.locator("[data-chart=losses] .plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    assert tip_at(opened.page, box["x"] + box["width"] * 3.5 / 4, box["y"] + 10) == [
        "step 3", "candidate: 1.0", "yardstick: 0.9", "noise run: 1.1", "target: 0.5",
    ]  # fmt: skip
    assert opened.page.locator(".tiles dt").first.inner_text() == "times the target"
    assert opened.complaints == []


def test_names_of_a_run_are_only_shown(chromium: Chromium, tmp_path: Path) -> None:
    folder = write_hostile_sample(tmp_path, HOSTILE)
    opened = chromium.open(publish_one(read_report(folder)))
    assert opened.page.evaluate("window.hacked") is None
    assert opened.complaints == []
    assert len(opened.requests) == 1
    assert HOSTILE in opened.page.locator("h1").inner_text()
    assert tip_at(opened.page, *middle_of(opened.page, "#worst-cell"))[0] == HOSTILE


def test_large_run_is_small_and_quick(chromium: Chromium, large: Path) -> None:
    assert large.stat().st_size < MAX_BYTES
    began = time.perf_counter()
    opened = chromium.open(large)
    assert time.perf_counter() - began < 3
    lines = tip_at(opened.page, *middle_of(opened.page, "#worst-cell"))
    assert lines[:3] == [
        "model.layers.7.mlp.down_proj",
        "prompt 1, token 17",
        "91.0x the noise of this row",
    ]
    assert "100,000 of 102,306 measurements are listed" in opened.page.locator("main").inner_text()
    assert opened.complaints == []


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


def test_table_scrolls_through_all_of_its_rows(chromium: Chromium, large: Path) -> None:
    page = chromium.open(large).page
    table = page.locator("#table")
    table.scroll_into_view_if_needed()
    assert page.locator("#filter-count").inner_text() == "100,000 rows"
    assert table.locator("tbody tr").count() < 100
    table.evaluate("element => { element.scrollTop = element.scrollHeight; }")
    last = table.locator("tbody tr:not(.spacer)").last.locator("td")
    lowest = draw_table(read_report(large.parent)).rows[-1]
    expect(last.nth(1)).to_have_text(lowest.module)
    expect(last.nth(4)).to_have_text(format_number(lowest.ratio))


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
    last = page.locator("#table tbody tr:not(.spacer)").last.locator("td")
    expect(last.nth(9)).to_have_text(str(count - 1))


def test_table_is_sorted_and_filtered(chromium: Chromium, failed: Path) -> None:
    page = chromium.open(failed).page
    page.locator("#filter").fill("replay-slope")
    assert page.locator("#filter-count").inner_text() == "58 rows"
    first = page.locator("#table tbody tr:not(.spacer)").first
    assert first.locator("td").nth(1).inner_text() == FAULTY
    page.get_by_role("button", name="module").click()
    assert first.locator("td").nth(1).inner_text() == "(model)"
    page.get_by_role("button", name="module").click()
    assert first.locator("td").nth(1).inner_text() == "model.rotary_emb"


def test_tree_is_open_along_the_path_to_the_fault_and_read_with_the_keyboard(
    chromium: Chromium, failed: Path
) -> None:
    page = chromium.open(failed).page
    opened = page.locator("#tree details[open] > summary .name").all_inner_texts()
    assert opened == ["(model)", "model", "layers", "2", "mlp"]
    fault = page.locator("#tree li > div:visible", has_text="down_proj")
    assert fault.locator(".mark").inner_text() == "worst"
    assert fault.locator(".judged.over").inner_text() == "14.6x / 3.0x"
    page.locator("#tree").focus()
    for _ in range(4):
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.querySelector('.name').textContent") == "0"
    page.keyboard.press("Enter")
    assert "0" in page.locator("#tree details[open] > summary .name").all_inner_texts()


def test_ranks_are_compared_layer_by_layer(chromium: Chromium, tmp_path: Path) -> None:
    rows = [
        Measurement(
            level="modules", module=f"layers.{layer}.up", port="output", order=layer, rank=rank,
            statistic="accumulated", actual=ratio, expected=1.0, ratio=ratio, limit=2.0,
        )
        for rank, ratios in enumerate([(1.0, 0.5), (0.25, 9.0)])
        for layer, ratio in enumerate(ratios)
    ]  # fmt: skip
    opened = chromium.open(publish_one(Report(tmp_path, Verdict(verdict=Outcome.FAIL), rows)))
    lines = opened.page.locator("#ranks tr").all_inner_texts()
    assert [line.split() for line in lines[1:]] == [
        ["0", "layers.0.up", "output", "1.0x", "/", "2.0x", "0.5", "0.25"],
        ["1", "layers.1.up", "output", "9.0x", "/", "2.0x", "0.125", "4.5"],
    ]
    assert opened.page.locator("#ranks .over").all_inner_texts() == ["9.0x / 2.0x", "4.5"]
    assert opened.complaints == []


def test_page_of_two_dumps_names_no_noise_run(chromium: Chromium, tmp_path: Path) -> None:
    changed = write(tmp_path / "mine", double_scale)
    judge(write(tmp_path / "golden"), changed, tmp_path / "run")
    opened = chromium.open(publish_one(read_report(tmp_path / "run")))
    assert opened.complaints == []
    text = opened.page.locator("main").inner_text()
    assert "noise run" not in text
    assert "injected" not in text
    assert opened.page.locator("#heat-map .located").inner_text() == "layers.1"
    assert opened.page.locator("#tree details[open] > summary .name").all_inner_texts() == [
        "(model)", "layers"
    ]  # fmt: skip
    plot = opened.page.locator("[data-chart=depth] .plot")
    plot.focus()
    found = []
    for _ in range(12):
        opened.page.keyboard.press("ArrowRight")
        found.append(opened.page.locator("#tip").inner_text().splitlines())
    (block,) = [lines for lines in found if lines[0] == "layers.1"]
    assert block[1].startswith("accumulated, candidate: ")
    assert block[3] == block[1].replace("accumulated, candidate", "added beyond the inputs")


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
    cells = chromium.open(path).page.locator("#table tbody tr:not(.spacer) td:nth-child(7)")
    assert cells.all_inner_texts() == [format_number(value) for value in NUMBERS]


@pytest.mark.parametrize("width", [400, 1280])
def test_page_fits_its_window(chromium: Chromium, failed: Path, width: int) -> None:
    assert not is_wider_than_its_window(chromium.open(failed, width=width).page)


def test_index_of_runs_opens_and_leads_to_a_run(chromium: Chromium, tmp_path: Path) -> None:
    runs = [
        read_report(write_sample(tmp_path / "clean", Sample(faulty_module=None))),
        read_report(write_sample(tmp_path / "failed", Sample())),
    ]
    opened = chromium.open(publish_several(runs, tmp_path / "all"), width=400)
    assert opened.page.locator("h1").inner_text() == "1 FAIL, 1 PASS"
    words: Any = opened.page.locator(".runs tbody .word").all_inner_texts()
    assert words == ["✗ FAIL", "✓ PASS"]
    assert not is_wider_than_its_window(opened.page)
    opened.page.get_by_role("link", name="failed").last.click()
    assert opened.page.locator("h1").inner_text().startswith("✗ FAIL")
    assert opened.complaints == []


def test_the_first_screen_has_its_style_in_another_page_and_leaves_that_one_alone(
    chromium: Chromium, failed: Path, tmp_path: Path
) -> None:
    notebook = tmp_path / "notebook.html"
    screen = render_first_screen(read_report(failed.parent))
    notebook.write_text(f"<body><h1 class=word>mine</h1><table></table>{screen}", encoding="utf-8")
    opened = chromium.open(notebook)

    def style(selector: str, name: str) -> str:
        script = "([selector, name]) => getComputedStyle(document.querySelector(selector))[name]"
        return str(opened.page.evaluate(script, [selector, name]))

    assert style(".assay-verdict h1", "fontSize") == "22px"
    assert style(".assay-verdict .banner", "backgroundColor") == "rgb(253, 241, 234)"
    assert style("body > h1", "fontSize") == "32px"
    assert style("body > table", "borderCollapse") == "separate"
    assert style("body", "backgroundColor") == "rgba(0, 0, 0, 0)"
    assert opened.complaints == []
