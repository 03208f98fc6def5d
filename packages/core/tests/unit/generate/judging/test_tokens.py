"""The tokens level: the same text, or a first difference that is or is not a near tie."""

import math

import pytest
import torch
from torch import Tensor

from assay.generate.judging.text_levels import FirstDifference, count_equal, first_differences

# Two texts of three tokens over a vocabulary of four.
EXPECTED = torch.tensor([[1, 2, 3], [0, 1, 2]])
LOGITS = torch.zeros(2, 3, 4).scatter(2, EXPECTED[:, :, None], 1.0)
ALTERNATING = 0.01 * torch.tensor([1.0, -1.0, 1.0, -1.0])
NOISE = LOGITS + ALTERNATING
LIMIT = 6.0


def differences(
    actual: Tensor, logits: Tensor = LOGITS, noise: Tensor = NOISE
) -> list[FirstDifference]:
    return first_differences(actual, EXPECTED, logits, noise, LIMIT)


def changed(row: int, step: int, token: int) -> Tensor:
    actual = EXPECTED.clone()
    actual[row, step] = token
    return actual


def test_equal_texts_have_no_difference() -> None:
    assert differences(EXPECTED.clone()) == []
    assert count_equal(EXPECTED, EXPECTED) == 6


def test_first_difference_of_each_text_is_reported_with_its_gap() -> None:
    actual = changed(1, 1, 3)
    actual[1, 2] = 0  # follows from it

    (found,) = differences(actual)

    assert (found.row, found.step, found.expected, found.actual) == (1, 1, 1, 3)
    assert found.gap == 1.0
    # Every logit of the noise run is off by 0.01, in the worst case both of the pair.
    assert found.noise == pytest.approx(0.02, rel=1e-5)
    assert not found.is_near_tie


def test_gap_within_the_noise_is_a_near_tie() -> None:
    logits = LOGITS.clone()
    logits[0, 2, 0] = 0.89  # the chosen token has 1

    (found,) = differences(changed(0, 2, 0), logits, logits + ALTERNATING)
    assert found.gap == pytest.approx(0.11)
    assert found.is_near_tie  # 6 times 0.02

    logits[0, 2, 0] = 0.87
    (found,) = differences(changed(0, 2, 0), logits, logits + ALTERNATING)
    assert not found.is_near_tie


def test_token_that_the_reference_holds_unlikely_is_no_near_tie() -> None:
    logits = LOGITS.clone()
    logits[0, 0, 3] = -50.0

    (found,) = differences(changed(0, 0, 3), logits, logits + ALTERNATING)

    assert found.gap == 51.0
    assert not found.is_near_tie


@pytest.mark.parametrize("side", ["reference", "noise run"])
def test_nan_decides_nothing(side: str) -> None:
    logits, noise = LOGITS.clone(), NOISE.clone()
    (logits if side == "reference" else noise)[0, 0] = math.nan

    (found,) = differences(changed(0, 0, 3), logits, noise)

    assert not found.is_near_tie


def test_common_shift_of_all_logits_is_no_noise() -> None:
    (found,) = differences(changed(0, 0, 3), noise=LOGITS + 5.0)

    assert found.noise == pytest.approx(0.0, abs=1e-6)
    assert not found.is_near_tie


def test_lucky_noise_at_a_token_is_at_least_the_usual_one() -> None:
    noise = NOISE.clone()
    noise[0, 0] = LOGITS[0, 0]

    (found,) = differences(changed(0, 0, 3), noise=noise)

    # Five of six tokens are off by 0.01: the root mean square is 0.01 sqrt(5/6).
    assert found.noise == pytest.approx(2 * 0.01 * math.sqrt(5 / 6), rel=1e-4)


@pytest.mark.parametrize("shape", [(2, 2), (1, 3), (2, 4)])
def test_texts_of_other_lengths_are_not_zipped(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"tokens, expected \(2, 3\)"):
        differences(torch.zeros(shape, dtype=torch.long))


def test_texts_without_tokens_have_no_difference() -> None:
    none = torch.zeros(2, 0, dtype=torch.long)

    assert first_differences(none, none, LOGITS[:, :0], NOISE[:, :0], LIMIT) == []
    assert count_equal(none, none) == 0


def test_equal_tokens_are_counted_up_to_the_first_difference() -> None:
    actual = torch.tensor([[1, 0, 3], [3, 1, 2]])

    assert count_equal(actual, EXPECTED) == 1  # then 0 of the second text


@pytest.mark.parametrize(("gap", "near"), [(0.6, True), (0.61, False), (-0.1, True)])
def test_gap_at_the_limit_is_a_near_tie(gap: float, *, near: bool) -> None:
    difference = FirstDifference(0, 0, 1, 2, gap, 0.1, 6.0)

    assert difference.is_near_tie is near
