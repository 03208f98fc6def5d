import math
from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor

from assay.generate.judging.logits import WholeMetrics
from assay.generate.judging.logits import compare_whole as compare_with_largest


def compare_whole(actual: Tensor, expected: Tensor) -> WholeMetrics:
    return compare_with_largest(actual, expected, expected.double().amax(-1))


def random(tokens: int, vocabulary: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, vocabulary, generator=generator, dtype=torch.float64)


def exact_divergence(actual: Tensor, expected: Tensor) -> float:
    """KL in 60 decimal digits."""
    with localcontext() as context:
        context.prec = 60
        p, q = ([Decimal(value) for value in side.tolist()] for side in (expected, actual))
        log_p, log_q = (sum((x.exp() for x in side), Decimal()).ln() for side in (p, q))
        kl = sum((a - log_p).exp() * ((a - log_p) - (b - log_q)) for a, b in zip(p, q, strict=True))
        return float(kl)


@pytest.mark.parametrize("size", [1e-15, 1e-7, 1e-4, 0.01, 0.3, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("shift", [0.0, 9.0])
def test_divergence_is_exact_at_every_size(size: float, shift: float) -> None:
    expected = 4 * random(3, 200)
    actual = expected + size * random(3, 200, seed=1) + shift

    found = compare_whole(actual, expected).kl

    for token in range(3):
        kl = exact_divergence(actual[token], expected[token])
        # Differences are known to 2**-24 of themselves: with a shift, to so much of the shift.
        rounding = 2.0**-24 * shift
        tolerance = 1e-6 * kl + rounding * math.sqrt(2 * kl) + rounding**2
        assert float(found[token]) == pytest.approx(kl, rel=0, abs=tolerance)


def test_divergence_of_float32_logits_from_float64_ones_is_exact_to_a_thousandth() -> None:
    expected = 4 * random(4, 500)
    actual = expected.float()

    found = compare_whole(actual, expected).kl

    for token in range(4):
        kl = exact_divergence(actual[token].double(), expected[token])
        assert 1e-15 < kl < 1e-12
        assert float(found[token]) == pytest.approx(kl, rel=1e-3)


def test_one_large_change_of_an_unlikely_token_is_not_lost() -> None:
    expected, actual = torch.zeros(1, 100), torch.zeros(1, 100)
    expected[0, 0] = 30.0
    expected[0, 1] = actual[0, 1] = -10.0
    actual[0, 0] = 30.0
    actual[0, 1] += 5.0

    assert float(compare_whole(actual, expected).kl) == pytest.approx(
        exact_divergence(actual[0].double(), expected[0].double()), rel=1e-4
    )


def test_token_that_is_not_finite_does_not_touch_its_neighbours() -> None:
    expected = random(4, 100)
    actual = expected + 0.5 * random(4, 100, seed=1)
    broken = actual.clone()
    broken[0, 3] = math.nan
    broken[2, 3] = math.inf

    found, clean = compare_whole(broken, expected).kl, compare_whole(actual, expected).kl

    assert found.isnan().tolist() == [True, False, True, False]
    assert found[1::2].tolist() == pytest.approx(clean[1::2].tolist(), rel=1e-6)


def test_differences_of_bfloat16_logits_are_not_rounded_to_bfloat16() -> None:
    expected = torch.tensor([[256.0, 0.0]]).bfloat16()
    actual = torch.tensor([[1.0, 0.0]]).bfloat16()

    # 255 is no bfloat16 number.
    assert compare_whole(actual, expected).max_difference.tolist() == [255.0]


def test_cosine_with_zero_logits_is_zero_unless_both_are() -> None:
    zero, other = torch.zeros(1, 4), torch.tensor([[0.0, 1.0, 0.0, 0.0]])

    assert compare_whole(other, zero).cosine.tolist() == [0.0]
    assert compare_whole(zero, other).cosine.tolist() == [0.0]
    assert compare_whole(zero, zero).cosine.tolist() == [1.0]


def test_no_tokens_have_no_metrics() -> None:
    assert compare_whole(torch.zeros(0, 5), torch.zeros(0, 5)).kl.shape == (0,)


def test_angle_of_nearly_parallel_logits_is_resolved() -> None:
    expected = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    turned = torch.tensor([[3.0 - 4e-6, 4.0 + 3e-6]], dtype=torch.float64)

    cosine = compare_whole(turned, expected).cosine

    # An angle of 1e-6: its cosine is 1 - 5e-13.
    assert 1 - float(cosine) == pytest.approx(5e-13, rel=1e-3)


def test_opposite_logits_have_a_cosine_of_minus_one() -> None:
    expected = random(2, 50)

    assert compare_whole(-expected, expected).cosine.tolist() == pytest.approx([-1.0, -1.0])
