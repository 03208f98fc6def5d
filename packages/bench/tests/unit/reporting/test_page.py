"""Content and coordinates of the page."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay.files import seal
from assay_bench.comparing.judging import compare
from assay_bench.comparing.terms import Terms
from assay_bench.reporting.comparison_files import JSON_FILE, comparison_as_json
from assay_bench.reporting.page import write_page
from assay_bench.reporting.pictures import Interval
from packages.bench.tests.unit.sample_evaluations import answered, evaluation


def test_a_comparison_is_shown_with_its_flips_escaped(tmp_path: Path) -> None:
    found = compare(evaluation(answered(400, 400)), evaluation(answered(390, 400)), Terms())
    text = comparison_as_json(found).replace("391", "<script>")
    (tmp_path / JSON_FILE).write_text(seal(json.loads(text)))
    page = write_page([tmp_path], [], tmp_path / "page.html").read_text()
    assert "<title>Benchmarks: FAIL</title>" in page
    assert "sums: 10 lost" in page
    assert "&lt;script&gt;" in page
    assert "<script>" not in page


def test_an_interval_lies_between_its_bounds_and_stays_in_the_picture() -> None:
    found = compare(evaluation(answered(400, 400)), evaluation(answered(398, 400)), Terms())
    (measure,) = found.tasks[0].measures
    drawn = Interval.of("sums", asdict(measure))
    assert drawn.margin == 25.0
    assert drawn.margin < drawn.low < drawn.difference < drawn.zero < drawn.high < 75
    far = Interval.of("sums", asdict(measure) | {"low": -0.9, "difference": -0.5, "high": -0.1})
    assert (far.low, far.difference, far.high) == (0.0, 0.0, 0.0)


def test_wrong_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"comparison\.json: cannot be read: No such file"):
        write_page([tmp_path], [], tmp_path / "page.html")
