"""Custom metrics."""

from pathlib import Path

import pytest
import torch

from assay.errors import UsageError
from assay.offline.measuring.metrics import CustomMetric, load_metrics

PAIR = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16), torch.zeros(2, 2)


def load(folder: Path, body: str, name: str = "metric") -> CustomMetric:
    file = folder / "mine.py"
    file.write_text(f"import sys\nimport torch\n\ndef {name}(golden, my):\n    {body}\n")
    (metric,) = load_metrics([f"{file}:{name}"], ())
    return metric


def test_a_metric_gets_flat_float32_tensors(tmp_path: Path) -> None:
    metric = load(tmp_path, "return 1, f'{golden.tolist()} {golden.dtype} {tuple(my.shape)}'")
    expected = "[1.0, 2.0, 3.0, 4.0] torch.float32 (4,)"
    assert metric.measure(*PAIR, "here") == (1.0, expected)


@pytest.mark.parametrize(
    ("value", "cell"),
    [("0.5", 0.5), ("3", 3.0), ("True", 1.0), ("'NaN'", "NaN"), ("golden.sum()", 10.0)],
)
def test_a_value_is_a_number_or_a_text(tmp_path: Path, value: str, cell: object) -> None:
    assert load(tmp_path, f"return {value}, ''").measure(*PAIR, "here") == (cell, "")


def test_a_metric_cannot_change_what_is_compared(tmp_path: Path) -> None:
    pair = torch.ones(2, 2), torch.ones(2, 2)
    load(tmp_path, "return float(golden.zero_().sum()), ''").measure(*pair, "here")
    assert bool((pair[0] == 1).all())


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("raise ValueError('odd')", "ValueError: odd"),
        ("return golden[9], ''", "IndexError"),
        ("sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_a_metric_that_raises_is_named(tmp_path: Path, body: str, problem: str) -> None:
    metric = load(tmp_path, body)
    message = rf"^--metric .*mine\.py:metric raised for a\.b:output at step 2: {problem}"
    with pytest.raises(UsageError, match=message):
        metric.measure(*PAIR, "a.b:output at step 2")


@pytest.mark.parametrize("found", ["None", "1.0", "(1.0, None)", "(golden, '')", "(1, 2, 3)"])
def test_another_result_is_refused(tmp_path: Path, found: str) -> None:
    metric = load(tmp_path, f"return {found}")
    with pytest.raises(UsageError, match=r"mine\.py:metric returned .* for here; it must return"):
        metric.measure(*PAIR, "here")


def test_a_name_that_a_column_has_is_refused(tmp_path: Path) -> None:
    metric = load(tmp_path, "return 1, ''", "limit")
    with pytest.raises(UsageError, match="there is a column limit; rename the function"):
        load_metrics([metric.reference], ["limit"])
    with pytest.raises(UsageError, match="there is a column limit; rename the function"):
        load_metrics([metric.reference, metric.reference], ())
