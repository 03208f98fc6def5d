"""Fuzzed readers of this package: expectations, thresholds, texts."""

import json
from datetime import UTC, datetime
from pathlib import Path

from assay.files import read_toml_record
from assay.runs.results import write_results
from assay_expectations.capture_and_verify import read_files
from assay_expectations.changes import change_as_markdown, find_change
from assay_expectations.decoders import Thresholds, prompt_lines, read_texts
from assay_expectations.page import collect_cells, write_page
from assay_expectations.records import read_expectation, write_expectation
from packages.core.tests.fuzz.reader import Reader
from packages.core.tests.unit.report.sample_runs import Sample, sample_verdict
from packages.expectations.tests.unit.sample_expectations import expectation

_THRESHOLDS = """
failure_rate = 0.01
false_failure_bound = 0.25

[thresholds]
cross_entropy = 0.5
diff_mean = 0.25

[runs]
"a/measurements.jsonl" = { tokens = 9, cross_entropy = 0.4, diff_mean = 0.2 }
"""


def _write_expectations(folder: Path) -> None:
    write_expectation(expectation(2), folder / "old.json")
    write_expectation(expectation(2, noise=0.02), folder / "new.json")


def _diff(folder: Path) -> object:
    old, new = read_expectation(folder / "old.json"), read_expectation(folder / "new.json")
    change = find_change(old, new)
    change_as_markdown(old, new, change)
    # The hash excludes provenance, which people may edit.
    return [one.model_dump(exclude={"provenance"}) for one in (old, new)], change.kind


def _write_page_sources(folder: Path) -> None:
    write_expectation(expectation(2), folder / "expectation.json")
    (folder / "runs" / "one").mkdir(parents=True)
    write_results(sample_verdict(Sample()), [], folder / "runs" / "one", ["assay"])


def _page(folder: Path) -> object:
    now, page = datetime(2030, 1, 2, tzinfo=UTC), folder / "page.html"
    cells = collect_cells(read_files([folder / "expectation.json"])[0], folder / "runs", page, now)
    return write_page(cells, "2030-01-02", page).read_text()


def _write_thresholds(folder: Path) -> None:
    (folder / "thresholds.toml").write_text(_THRESHOLDS)


def _write_texts(folder: Path) -> None:
    lines = [json.dumps({"prompt": f"question {number}"}) for number in range(3)]
    (folder / "texts.jsonl").write_text("\n".join(lines))


READERS = (
    Reader("expectation", _write_expectations, _diff, sealed=True),
    Reader("expectations-page", _write_page_sources, _page),
    Reader("thresholds", _write_thresholds, lambda folder: read_toml_record(Thresholds, folder / "thresholds.toml")),
    Reader("texts", _write_texts,
           lambda folder: prompt_lines(read_texts(folder / "texts.jsonl"), 2, 4)),
)  # fmt: skip
