"""Published and custom metrics of tensor pairs."""

import math
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor

from assay.comparison.measuring import pair_values as published
from assay.comparison.measuring.pair_values import (
    CustomMetric,
    MeasurePair,
    PairMetrics,
    kl_divergences,
    load_metrics,
    measure_as_published,
    measure_metrics,
)
from assay.errors import UsageError
from assay.metrics import ShapeMismatchError

BOTH = [measure_metrics, measure_as_published]
LN2, LN3 = math.log(2), math.log(3)


def rows(*values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("measure", BOTH)
def test_every_metric_of_a_small_pair(measure: MeasurePair) -> None:
    found = measure(rows([3.0, 4.0]), rows([3.0, 2.0]))
    assert found.cosine_similarity == pytest.approx(17 / (5 * math.sqrt(13)))
    assert (found.max_relative_error, found.mean_relative_error) == (0.5, 0.25)
    assert (found.max_absolute_error, found.mean_absolute_error) == (2.0, 1.0)
    assert found.relative_euclidean_distance == pytest.approx(2 / 5)
    # softmax(0, 1) against softmax(1, 0): the log ratios are -1 and 1.
    assert found.kl_divergence == pytest.approx((math.e - 1) / (math.e + 1))


@pytest.mark.parametrize("measure", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_equal_tensors_have_no_error(measure: MeasurePair, dtype: torch.dtype) -> None:
    one = rows([1.0, -2.0, 0.0], [1e-6, 3.0, 1.0], dtype=dtype)
    found = measure(one, one)
    assert list(asdict(found).values())[1:] == [0.0] * 6 + [0, 0]
    assert found.cosine_similarity == pytest.approx(1.0)


@pytest.mark.parametrize("measure", BOTH)
def test_relative_errors_are_relative_to_the_expected_side(measure: MeasurePair) -> None:
    assert measure(rows([2.0]), rows([1.0])).max_relative_error == 0.5
    assert measure(rows([1.0]), rows([2.0])).max_relative_error == 1.0
    assert measure(rows([2.0]), rows([1.0])).relative_euclidean_distance == 0.5
    assert measure(rows([1.0]), rows([2.0])).relative_euclidean_distance == 1.0


@pytest.mark.parametrize("measure", BOTH)
def test_a_divergence_is_weighted_by_the_expected_side(measure: MeasurePair) -> None:
    halves, thirds = rows([0.0, 0.0]), rows([LN2, 0.0])  # (1/2, 1/2) and (2/3, 1/3)
    assert measure(halves, thirds).kl_divergence == pytest.approx(math.log(9 / 8) / 2)
    assert measure(thirds, halves).kl_divergence == pytest.approx(5 / 3 * LN2 - LN3)


@pytest.mark.parametrize("measure", BOTH)
def test_opposite_and_orthogonal_tensors(measure: MeasurePair) -> None:
    assert measure(rows([1.0, 2.0]), rows([-1.0, -2.0])).cosine_similarity == pytest.approx(-1.0)
    assert measure(rows([1.0, 0.0]), rows([0.0, 1.0])).cosine_similarity == 0.0


@pytest.mark.parametrize("measure", BOTH)
def test_two_tensors_of_zeros_agree(measure: MeasurePair) -> None:
    zeros = torch.zeros(2, 3)
    assert measure(zeros, zeros) == PairMetrics(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("measure", BOTH)
def test_an_empty_pair_has_no_metric(measure: MeasurePair) -> None:
    found = measure(torch.zeros(0, 4), torch.zeros(0, 4))
    assert all(math.isnan(value) for value in list(asdict(found).values())[:7])


@pytest.mark.parametrize("measure", BOTH)
def test_other_shapes_are_refused(measure: MeasurePair) -> None:
    with pytest.raises(ShapeMismatchError, match=r"actual has shape \(3, 2\), expected \(2, 3\)"):
        measure(torch.zeros(2, 3), torch.zeros(3, 2))


@pytest.mark.parametrize("measure", BOTH)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_integers_are_measured_as_numbers(measure: MeasurePair, dtype: torch.dtype) -> None:
    found = measure(rows([1, 0], dtype=dtype), rows([1, 1], dtype=dtype))
    assert found.cosine_similarity == pytest.approx(1 / math.sqrt(2))
    assert found.relative_euclidean_distance == 1.0


def test_an_absolute_error_counts_where_the_expected_value_is_zero() -> None:
    pair = rows([0.0, 1.0]), rows([5.0, 1.0])
    found, as_published = measure_metrics(*pair), measure_as_published(*pair)
    assert (found.max_absolute_error, found.mean_absolute_error) == (5.0, 2.5)
    assert (as_published.max_absolute_error, as_published.mean_absolute_error) == (0.0, 0.0)


def test_a_relative_error_does_not_count_where_the_expected_value_is_zero() -> None:
    found = measure_metrics(rows([0.0, 1e-8, 2.0]), rows([5.0, 1.0, 3.0]))
    assert found.max_relative_error == 0.5
    assert found.mean_relative_error == pytest.approx(0.5 / 3)


def test_the_divergence_is_taken_from_the_worst_row() -> None:
    expected = rows([0.0, 0.0], [0.0, 0.0], [10.0, 10.0])
    actual = rows([0.0, 0.0], [LN2, 0.0], [10.0, 10.0])
    assert kl_divergences(expected, actual).tolist() == pytest.approx([0, math.log(9 / 8) / 2, 0])
    assert measure_metrics(expected, actual).kl_divergence == pytest.approx(math.log(9 / 8) / 2)


def test_the_published_divergence_has_one_softmax_for_all_rows() -> None:
    # Flattened, the second row of either side has nearly all of the probability.
    expected, actual = rows([0.0, 0.0], [50.0, 50.0]), rows([9.0, 0.0], [50.0, 50.0])
    row = -math.log(2) + math.log1p(math.exp(9)) - 4.5
    assert measure_metrics(expected, actual).kl_divergence == pytest.approx(row)
    assert measure_as_published(expected, actual).kl_divergence < 1e-15


def test_a_tensor_of_zeros_is_not_near_to_another() -> None:
    pair = torch.zeros(1, 2), rows([3.0, 4.0])
    found, as_published = measure_metrics(*pair), measure_as_published(*pair)
    assert (found.relative_euclidean_distance, as_published.relative_euclidean_distance) == (
        math.inf,
        0.0,
    )
    assert (found.cosine_similarity, as_published.cosine_similarity) == (0.0, 0.0)
    assert measure_metrics(*reversed(pair)).relative_euclidean_distance == 1.0
    assert measure_metrics(*reversed(pair)).cosine_similarity == 0.0


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_leaves_the_metrics_of_the_others(odd: float) -> None:
    expected, actual = rows([3.0, 4.0], [7.0, 0.0]), rows([3.0, 2.0], [odd, 0.0])
    found = measure_metrics(expected, actual)
    assert (found.max_absolute_error, found.mean_absolute_error) == (2.0, 2 / 3)
    assert found.relative_euclidean_distance == pytest.approx(2 / 5)
    assert (found.num_nonfinite_expected, found.num_nonfinite_actual) == (0, 1)
    swapped = measure_metrics(actual, expected)
    assert (swapped.num_nonfinite_expected, swapped.num_nonfinite_actual) == (1, 0)


def test_a_row_with_a_nan_leaves_the_divergences_of_the_others() -> None:
    expected, actual = rows([0.0, 0.0], [0.0, 0.0]), rows([LN2, 0.0], [math.nan, 0.0])
    assert measure_metrics(expected, actual).kl_divergence == pytest.approx(math.log(9 / 8) / 2)


def test_by_the_published_formulas_a_nan_drops_all_metrics() -> None:
    found = measure_as_published(rows([1.0, 2.0]), rows([1.0, math.nan]))
    assert all(math.isnan(value) for value in list(asdict(found).values())[:7])
    assert (found.num_nonfinite_expected, found.num_nonfinite_actual) == (0, 1)


def test_tensors_without_a_finite_value_have_no_metric() -> None:
    found = measure_metrics(rows([math.nan]), rows([1.0]))
    assert all(math.isnan(value) for value in list(asdict(found).values())[:7])


def test_logits_that_both_sides_mask_have_no_probability() -> None:
    masked = -math.inf
    assert kl_divergences(rows([0.0, 0.0, masked]), rows([LN2, 0.0, masked])).tolist() == (
        pytest.approx([math.log(9 / 8) / 2])
    )
    assert kl_divergences(rows([0.0, 0.0]), rows([0.0, masked])).tolist() == [math.inf]
    assert kl_divergences(rows([0.0, masked]), rows([0.0, 0.0])).tolist() == pytest.approx([LN2])


def test_denormal_values_keep_their_direction() -> None:
    found = measure_metrics(rows([3e-40, 4e-40]), rows([3e-40, 2e-40]))
    assert found.cosine_similarity == pytest.approx(17 / (5 * math.sqrt(13)), rel=1e-4)


def test_large_values_do_not_overflow() -> None:
    found = measure_metrics(rows([3e38, 0.0]), rows([0.0, 3e38]))
    assert found.relative_euclidean_distance == pytest.approx(math.sqrt(2))
    assert found.kl_divergence == pytest.approx(3e38)


@pytest.mark.parametrize("measure", BOTH)
@pytest.mark.parametrize("block", [1, 2, 3, 7, 12])
def test_block_size_does_not_change_metrics(
    measure: MeasurePair, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(3)
    pair = [torch.randn(4, 6, generator=generator) for _ in range(2)]
    whole = asdict(measure(*pair))
    monkeypatch.setattr(published, "BLOCK_ELEMENTS", block)
    assert asdict(measure(*pair)) == pytest.approx(whole)


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
