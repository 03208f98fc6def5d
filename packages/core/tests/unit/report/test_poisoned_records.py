"""Hostile text in any field of a verdict or a measurement reaches no output format."""

import io
from pathlib import Path

import pytest

from assay.foreign_text import escape_output
from assay.output.console import open_text_console
from assay.report.page.html import render_first_screen, render_html, render_index
from assay.report.run_report import Report
from assay.report.text_formats import print_index, print_report, render_markdown
from assay.verdicts import Coverage, Location, Suspect, Unmatched, Verdict
from packages.core.tests.poison import (
    POISON,
    assert_harmless_html,
    assert_harmless_markdown,
    assert_harmless_text,
    poisoned,
)
from packages.core.tests.unit.report.sample_runs import (
    Sample,
    sample_measurements,
    sample_verdict,
)

SAMPLE = Sample(num_layers=1, num_prompts=2, prompt_length=18, num_new_tokens=2,
                faulty_module="model.layers.0.mlp.down_proj")  # fmt: skip
ROWS = sample_measurements(SAMPLE)[:40]


def every_field() -> Verdict:
    """A verdict in which every optional text is given."""
    verdict = sample_verdict(SAMPLE)
    place = Location(phase="forward", module="m", op="o", parameter="m.p")
    suspects = [
        *verdict.suspects,
        Suspect(location=place, statistic="s", noise_ratio=9.0, limit=3.0),
    ]
    return verdict.model_copy(
        update={"headline": "h", "statistic": "s", "notes": ["n"], "location": place,
                "suspects": suspects, "files": {"f": "d"},
                "unmatched": Unmatched(expected=["e"], actual=["a"]),
                "coverage": Coverage(modules=3, modules_run=1, not_run=["v.a"],
                    not_run_parts={"v": 2}, unused_parameters=["u"], unrouted_experts=["x"],
                    equal_rows=["r"], allowed=["v.*"])}
    )  # fmt: skip


VERDICTS = dict(poisoned(every_field()))


def test_every_free_text_of_a_verdict_is_poisoned() -> None:
    fields = {path.partition(".")[0] for path in VERDICTS}
    assert len(VERDICTS) > 60
    assert fields >= {
        "command", "environment", "model", "reference", "candidate", "levels", "location",
        "suspects", "notes", "headline", "unmatched", "statistic", "files",
    }  # fmt: skip


@pytest.mark.parametrize("path", VERDICTS)
def test_no_format_lets_the_text_of_a_verdict_through(path: str) -> None:
    report = Report(Path("run"), VERDICTS[path], ROWS, (POISON,))
    stream = io.StringIO()
    print_report(report, open_text_console(stream))
    print_index([report, report], open_text_console(stream), Path("page"))
    assert_harmless_text(stream.getvalue())
    assert_harmless_markdown(render_markdown(report))
    assert_harmless_html(render_html(report))
    assert_harmless_html(render_first_screen(report))
    assert_harmless_html(render_index([report], {report.folder: "x"}))
    assert_harmless_text(escape_output(report.verdict.to_json()))


@pytest.mark.parametrize("index", [0, -1], ids=["module", "token"])
def test_no_format_lets_the_text_of_a_measurement_through(index: int) -> None:
    changed = dict(poisoned(ROWS[index]))
    assert set(changed) >= {"level", "module", "port", "statistic"}
    for row in changed.values():
        report = Report(Path("run"), every_field(), [*ROWS, row])
        stream = io.StringIO()
        print_report(report, open_text_console(stream))
        assert_harmless_text(stream.getvalue())
        assert_harmless_markdown(render_markdown(report))
        assert_harmless_html(render_html(report))
