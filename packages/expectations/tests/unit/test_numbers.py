"""Shapes: R tokens, K kept ids and the rest."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from assay.models import RECIPES
from assay_expectations.judging.numbers import (
    JudgedSignature,
    judge_numbers,
    limits_origin,
    relative_errors,
)
from assay_expectations.records import Distributions, Expectation, Machine
from packages.expectations.tests.unit.sample_expectations import (
    NOISE,
    YARDSTICK,
    distributions,
    expectation,
    off,
)


def judge(expected: Expectation, given: Distributions) -> JudgedSignature:
    return judge_numbers(expected.signature, given, expected.key.machine.dtype, expected.limits)


def test_ratios_divide_the_two_errors() -> None:
    # Errors of 1 and 3 times the noise: rms sqrt((1 + 9) / 2), worst 3.
    judged = judge(expectation(2), distributions(off(NOISE), off(3 * NOISE)))
    assert judged.ratios == pytest.approx(
        {"logits-error": math.sqrt(5), "logits-worst": 3, "logits-whole": math.sqrt(5)}
    )
    assert judged.num_tokens == 2
    assert not judged.passed
    assert judged.worst.statistic == "logits-error"


def test_captured_run_passes_with_a_ratio_of_one() -> None:
    judged = judge(expectation(2), distributions(off(NOISE), off(NOISE)))
    assert set(judged.ratios.values()) == {1.0}
    assert judged.passed


def test_one_bad_token_fails_even_if_the_average_passes() -> None:
    judged = judge(expectation(10), distributions(*[off(NOISE)] * 9, off(4 * NOISE)))
    # rms sqrt((9 + 16) / 10) = 1.58 is within 2, the worst token's 4 is over 3.
    assert judged.ratios["logits-error"] == pytest.approx(math.sqrt(2.5))
    assert judged.worst.statistic == "logits-worst"
    assert not judged.passed


def test_error_outside_of_the_kept_ids_fails() -> None:
    captured = expectation()
    given = captured.signature.captured.model_copy(update={"projections": [[[[-1.0 + 3 * NOISE]]]]})
    judged = judge(captured, given)
    assert judged.ratios == pytest.approx(
        {"logits-error": 1.0, "logits-worst": 1.0, "logits-whole": 3.0}
    )
    assert not judged.passed


def test_noise_floor_is_half_a_unit_roundoff() -> None:
    half_a_unit = 2.0**-9  # bfloat16 has 8 bits of significand
    # The value of the rest has no error and equals the mean of the kept values.
    judged = judge(expectation(noise=0.0), distributions(off(1.5 * half_a_unit)))
    assert judged.ratios == pytest.approx(dict.fromkeys(judged.ratios, 1.5))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_output_has_an_infinite_ratio(bad: float) -> None:
    judged = judge(expectation(2), distributions(off(NOISE), [bad, YARDSTICK[1]]))
    assert judged.worst.value == math.inf
    assert not judged.passed


def test_relative_errors_by_hand() -> None:
    expected = np.array([[-1.0, -3.0], [-2.0, -6.0], [-1.0, -math.inf], [0.0, 0.0]])
    actual = np.array([[-1.0, -3.0], [-2.0, -7.0], [-1.0, -math.inf], [0.0, 0.0]])
    # Second row: error sqrt(1 / 2) over a spread of 2.
    np.testing.assert_allclose(relative_errors(actual, expected), [0, math.sqrt(0.5) / 2, 0, 0])


def test_impossible_token_that_became_possible_has_an_infinite_error() -> None:
    errors = relative_errors(np.array([[-1.0, -9.0]]), np.array([[-1.0, -math.inf]]))
    assert errors[0] == math.inf


def host(**changes: str) -> Machine:
    record = {"vendor": "cpu", "architecture": "x86_64", "dtype": "float32", "precision": "float32"}
    return Machine.model_validate(record | changes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_origin_of_the_limits_matches_the_documented_table(dtype: str) -> None:
    text = (Path(__file__).parents[4] / "docs" / "expectations.md").read_text(encoding="utf-8")
    table = text.partition("| run | float32 | bfloat16 |")[2].partition("| **")[0]
    runs = re.findall(r"([\d.]+) / ([\d.]+) / ([\d.]+)", table)
    assert runs
    pooled, worst, whole = (max(float(run[part]) for run in runs) for part in range(3))
    assert limits_origin("micro:llama", host(dtype=dtype, precision=dtype)) == (
        f"{len(RECIPES) * len(runs)} clean runs reached {pooled} pooled, {worst} at the worst token and {whole} over"
        " the whole vocabulary"
    )


@pytest.mark.parametrize(
    ("model", "machine"),
    [
        ("gemma2", host()),
        ("micro:llama?trained=0", host()),
        ("micro:llama", host(architecture="aarch64")),
        ("micro:llama", host(vendor="other")),
        ("micro:llama", host(dtype="float16", precision="float16")),
        ("micro:llama", host(precision="tf32")),
    ],
)
def test_origin_without_calibration_names_no_runs(model: str, machine: Machine) -> None:
    assert limits_origin(model, machine) == "not calibrated for this model and device"
