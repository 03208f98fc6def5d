"""The HTML report in a real browser: opened from disk, without a network."""

import base64
import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from assay.judge.wording import format_number
from assay.report.page.html import publish_one, render_first_screen, write_index
from assay.report.run_report import Report, read_report
from assay.verdicts import Measurement, Outcome, Verdict
from packages.core.tests.subsystem.report.opened_pages import (
    FAULTY,
    MAX_BYTES,
    Chromium,
    middle_of,
    tip_at,
)
from packages.core.tests.unit.report.sample_runs import Sample, write_hostile_sample, write_sample

FAULTY_LINE = 4 + 2 * 13 + 12  # model, embedding and so on; two layers; last of the third
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='hacked = 1'>\"&"


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
    packed = base64.b64decode(page.locator("#data").text_content() or "")
    faulty = json.loads(gzip.decompress(packed))["heatMap"]
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


def test_a_pass_opens_at_the_start_of_its_map_and_all_labels_fit(
    chromium: Chromium, tmp_path: Path
) -> None:
    folder = write_sample(tmp_path, Sample(num_layers=8, num_prompts=9, faulty_module=None))
    page = chromium.open(publish_one(read_report(folder)), width=390).page
    start = page.evaluate(
        "(map => [map.scrollLeft, map.scrollTop])(document.getElementById('heat-map'))"
    )
    assert start == [0, 0]
    labels = page.locator("[data-chart=kl] .x-axis span")
    assert labels.all_inner_texts() == [str(number) for number in range(9)]
    assert page.locator("[data-chart=kl] .x-unit").inner_text() == "prompt"
    right = page.evaluate("(s => Math.max(...s.map(one => one.getBoundingClientRect().right)))"
                          "([...document.querySelectorAll('.x-axis span')])")  # fmt: skip
    assert right <= 390
    assert not is_wider_than_its_window(page)


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
    heading = page.locator("#heat-map [title^=prompt]")
    assert heading.get_attribute("title") == "prompt 0, tokens 0 to 3"
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
    plot = opened.page.locator("[data-chart=loss] .plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    assert tip_at(opened.page, box["x"] + box["width"] * 3.5 / 4, box["y"] + 10) == [
        "step 3", "candidate: 1.0", "exact reference: 0.9", "noise run: 1.1", "target: 0.5",
    ]  # fmt: skip
    assert opened.page.locator(".tiles dt").first.inner_text() == "times the target"
    assert opened.complaints == []
    assert not is_wider_than_its_window(chromium.open(tmp_path / "report.html", width=400).page)


def test_names_of_a_run_are_only_shown(chromium: Chromium, tmp_path: Path) -> None:
    folder = write_hostile_sample(tmp_path, HOSTILE)
    opened = chromium.open(publish_one(read_report(folder)))
    assert opened.page.evaluate("window.hacked") is None
    assert opened.complaints == []
    assert len(opened.requests) == 1
    assert HOSTILE in opened.page.locator("h1").inner_text()
    assert tip_at(opened.page, *middle_of(opened.page, "#worst-cell"))[0] == HOSTILE


@pytest.mark.parametrize("width", [400, 1280])
def test_page_fits_its_window(chromium: Chromium, failed: Path, width: int) -> None:
    assert not is_wider_than_its_window(chromium.open(failed, width=width).page)


def test_index_of_runs_opens_and_leads_to_a_run(chromium: Chromium, tmp_path: Path) -> None:
    runs = [
        read_report(write_sample(tmp_path / "clean", Sample(faulty_module=None))),
        read_report(write_sample(tmp_path / "failed", Sample())),
    ]
    opened = chromium.open(write_index(runs, tmp_path), width=400)
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


def test_only_decode_steps_are_shown_on_request(chromium: Chromium, failed: Path) -> None:
    opened = chromium.open(failed)
    page = opened.page

    def columns() -> int:
        return int(page.evaluate("document.querySelector('#heat-map canvas').width"))

    assert columns() == 4 * (24 + 8)
    page.locator("#decode-only").check()
    assert columns() == 4 * 8
    shown = tip_at(page, *middle_of(page, "#worst-cell"))
    assert shown[0] != FAULTY or shown[1] != "prompt 1, token 17"  # a token of the prompt
    assert "step" in shown[1]
    page.locator("#heat-map").focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#heat-map .cursor").count() == 1
    page.locator("#decode-only").uncheck()
    assert columns() == 4 * (24 + 8)
    assert tip_at(page, *middle_of(page, "#worst-cell"))[1] == "prompt 1, token 17"
    assert opened.complaints == []


def test_the_headline_leads_to_the_rows_of_its_module(chromium: Chromium, failed: Path) -> None:
    page = chromium.open(failed).page
    page.locator("#to-rows").click()
    assert page.locator("#filter").input_value() == FAULTY
    modules = page.locator("#table tbody tr:not(.spacer) td:nth-child(2)").all_inner_texts()
    assert set(modules) == {FAULTY}


def test_the_diagnosis_is_explained_on_the_page(chromium: Chromium, failed: Path) -> None:
    page = chromium.open(failed).page
    explained = page.locator("#diagnosis")
    assert "What to do next: " in explained.inner_text()
    assert explained.locator("p").first.is_visible()
