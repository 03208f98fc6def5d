"""The tree, the ranks and the curves of a comparison in a real browser."""

from pathlib import Path

from assay.report.page.html import publish_one
from assay.report.run_report import Report, read_report
from assay.verdicts import Measurement, Outcome, Verdict
from packages.core.tests.subsystem.report.opened_pages import Chromium
from packages.core.tests.unit.comparison.small_dumps import double_scale, judge, write


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
    assert block[1].startswith("accumulated, ACTUAL: ")
    assert block[3] == block[1].replace("accumulated, ACTUAL", "added beyond the inputs")
