"""Hostile text in an expectation stays harmless in pull requests and on the page."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay.foreign_text import escape_output
from assay_expectations.judging.changes import change_as_markdown, find_change
from assay_expectations.page import collect_cells, write_page
from assay_expectations.records import Expectation, write_expectation
from packages.core.tests.poison import (
    assert_harmless_html,
    assert_harmless_markdown,
    assert_harmless_text,
    poisoned,
)
from packages.expectations.tests.unit.sample_expectations import expectation

MADE = expectation()
PROVENANCE = MADE.provenance.model_copy(
    update={
        "approved_by": "Ada",
        "reason": "a new driver",
        "container": "image@sha256",
        "process": {"date": "2026-02-01", "cpu": "C", "variables": {"OMP_NUM_THREADS": "4"}},
    }
)
BEFORE = MADE.model_copy(update={"provenance": PROVENANCE})
AFTER = dict(poisoned(BEFORE))


def test_every_free_text_is_poisoned() -> None:
    assert len(AFTER) > 20
    assert {path.partition(".")[0] for path in AFTER} >= {"model", "provenance", "key"}


@pytest.mark.parametrize("path", AFTER)
def test_text_of_an_expectation_is_harmless(path: str, tmp_path: Path) -> None:
    after: Expectation = AFTER[path]
    for pair in ((BEFORE, after), (after, BEFORE), (after, after)):
        try:
            change = find_change(*pair)
        except UsageError as error:
            assert_harmless_text(escape_output(str(error)))
        else:
            assert_harmless_markdown(change_as_markdown(*pair, change))
    file = write_expectation(after, tmp_path / "kept" / "x.json")
    cells = collect_cells([file], tmp_path / "runs", tmp_path / "p.html", datetime.now(UTC))
    assert_harmless_html(write_page(cells, "2026-07-11", tmp_path / "p.html").read_text())
