"""Shapes: R tokens, K kept ids and the rest."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from assay_expectations.judging import judge_numbers, limits_origin, relative_errors
from assay_expectations.records import (
    Content,
    Expectation,
    Key,
    LogProbabilities,
    Machine,
    Settings,
    Signature,
)

# Its values are 1 away from their mean: the spread is 1.
YARDSTICK = [-1.0, -3.0]
NOISE = 0.01


def one(*tokens: list[float]) -> list[LogProbabilities]:
    return [[list(tokens)]]


def expectation(yardstick: list[float], captured: list[float]) -> Expectation:
    return Expectation(
        schema=1,
        model="micro:llama",
        key=Key(
            machine=Machine(vendor="x", architecture="y", dtype="bfloat16", precision="bfloat16"),
            software={},
            content=Content(
                weights_hash="", tokenizer_hash="", prompts_hash="", settings=Settings()
            ),
        ),
        limits={"logits-error": 2.0, "logits-worst": 3.0},
        limits_origin="by hand",
        signature=Signature(
            tokens=[[[1, 2]]],
            top_ids=[[[[1], [2]]]],
            yardstick=one(yardstick, yardstick),
            captured=one(captured, captured),
        ),
        provenance={},
    )


def shifted(by: float) -> list[float]:
    return [YARDSTICK[0] + by, YARDSTICK[1] - by]


def test_the_ratios_are_those_of_the_two_errors() -> None:
    clean = expectation(YARDSTICK, shifted(NOISE))
    # Errors of 1 and 3 times the noise: rms sqrt((1 + 9) / 2), worst 3.
    judged = judge_numbers(clean, one(shifted(NOISE), shifted(3 * NOISE)))
    values = {item.ratio.statistic: item.ratio.value for item in judged.judged}
    assert values["logits-error"] == pytest.approx(math.sqrt(5))
    assert values["logits-worst"] == pytest.approx(3)
    assert judged.num_tokens == 2
    assert not judged.passed
    assert judged.worst.ratio.statistic == "logits-error"
    assert judged.worst.resolution == pytest.approx(2 * NOISE)


def test_the_captured_run_itself_passes_with_a_ratio_of_one() -> None:
    judged = judge_numbers(expectation(YARDSTICK, shifted(NOISE)), one(*[shifted(NOISE)] * 2))
    assert [item.ratio.value for item in judged.judged] == [1.0, 1.0]
    assert judged.passed


def test_one_bad_token_fails_though_the_average_does_not() -> None:
    captured = expectation(YARDSTICK, shifted(NOISE))
    many = captured.model_copy(
        update={
            "signature": Signature(
                tokens=[[[1] * 10]],
                top_ids=[[[[1]] * 10]],
                yardstick=one(*[YARDSTICK] * 10),
                captured=one(*[shifted(NOISE)] * 10),
            )
        }
    )
    judged = judge_numbers(many, one(*[shifted(NOISE)] * 9, shifted(4 * NOISE)))
    # rms sqrt((9 + 16) / 10) = 1.58 is within 2, the worst token's 4 is over 3.
    assert judged.judged[0].ratio.value == pytest.approx(math.sqrt(2.5))
    assert judged.worst.ratio.statistic == "logits-worst"
    assert not judged.passed


def test_a_capture_without_any_noise_is_held_to_half_a_unit_roundoff() -> None:
    exact = expectation(YARDSTICK, YARDSTICK)
    half_a_unit = 2.0**-9  # bfloat16 has 8 bits of significand
    judged = judge_numbers(exact, one(*[shifted(1.5 * half_a_unit)] * 2))
    assert [item.ratio.value for item in judged.judged] == pytest.approx([1.5, 1.5])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_an_infinite_ratio(bad: float) -> None:
    judged = judge_numbers(
        expectation(YARDSTICK, shifted(NOISE)), one(shifted(NOISE), [bad, YARDSTICK[1]])
    )
    assert judged.worst.ratio.value == math.inf
    assert not judged.passed


def test_negating_or_permuting_is_no_small_difference() -> None:
    # What a signature of the largest minus the smallest logit cannot see.
    judged = judge_numbers(
        expectation(YARDSTICK, shifted(NOISE)), one(*[list(reversed(YARDSTICK))] * 2)
    )
    assert judged.worst.ratio.value == pytest.approx(2 / NOISE)


def test_relative_errors_by_hand() -> None:
    expected = np.array([[-1.0, -3.0], [-2.0, -6.0], [-1.0, -math.inf], [0.0, 0.0]])
    actual = np.array([[-1.0, -3.0], [-2.0, -7.0], [-1.0, -math.inf], [0.0, 0.0]])
    # Second row: error sqrt(1 / 2) over a spread of 2.
    np.testing.assert_allclose(relative_errors(actual, expected), [0, math.sqrt(0.5) / 2, 0, 0])


def test_a_token_that_became_possible_is_an_infinite_error() -> None:
    errors = relative_errors(np.array([[-1.0, -9.0]]), np.array([[-1.0, -math.inf]]))
    assert errors[0] == math.inf


def host(**changes: str) -> Machine:
    record = {"vendor": "cpu", "architecture": "x86_64", "dtype": "float32", "precision": "float32"}
    return Machine.model_validate(record | changes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_origin_of_the_limits_is_the_table_of_the_documentation(dtype: str) -> None:
    text = (Path(__file__).parents[4] / "docs" / "expectations.md").read_text(encoding="utf-8")
    table = text.partition("| run | float32 | bfloat16 |")[2].partition("| **")[0]
    runs = re.findall(r"([\d.]+) / ([\d.]+)", table)
    assert runs
    pooled, worst = (max(float(run[part]) for run in runs) for part in (0, 1))
    assert limits_origin("micro:llama", host(dtype=dtype, precision=dtype)) == (
        f"{len(runs)} clean runs reached {pooled} pooled and {worst} at the worst token"
    )


@pytest.mark.parametrize(
    ("model", "machine"),
    [
        ("micro:gemma2", host()),
        ("micro:llama?trained=0", host()),
        ("micro:llama", host(architecture="aarch64")),
        ("micro:llama", host(vendor="other")),
        ("micro:llama", host(dtype="float16", precision="float16")),
        ("micro:llama", host(precision="tf32")),
    ],
)
def test_what_was_not_calibrated_names_no_runs(model: str, machine: Machine) -> None:
    assert limits_origin(model, machine) == "not calibrated for this model and device"
