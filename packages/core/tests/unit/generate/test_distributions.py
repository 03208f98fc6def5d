"""Metrics of next-token distributions, and the eight faults of their published implementation."""

import math
import weakref
from decimal import Decimal, localcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.generate import generation_loop as driving
from assay.generate.generation_loop import _stack
from assay.generate.text_levels import (
    TOP_K,
    WholeMetrics,
    compare_logits,
    failure_rate,
    judge_logits,
)
from assay.generate.text_levels import compare_whole as compare_with_largest
from assay.inputs import Batch
from assay.metrics import ShapeMismatchError
from assay.verdicts import Ratio


def compare_whole(actual: Tensor, expected: Tensor) -> WholeMetrics:
    return compare_with_largest(actual, expected, expected.double().amax(-1))


def plain_random(tokens: int, vocabulary: int, seed: int = 0) -> Tensor:
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
    expected = 4 * plain_random(3, 200)
    actual = expected + size * plain_random(3, 200, seed=1) + shift

    found = compare_whole(actual, expected).kl

    for token in range(3):
        kl = exact_divergence(actual[token], expected[token])
        # Differences are known to 2**-24 of themselves: with a shift, to so much of the shift.
        rounding = 2.0**-24 * shift
        tolerance = 1e-6 * kl + rounding * math.sqrt(2 * kl) + rounding**2
        assert float(found[token]) == pytest.approx(kl, rel=0, abs=tolerance)


def test_divergence_of_float32_logits_from_float64_ones_is_exact_to_a_thousandth() -> None:
    expected = 4 * plain_random(4, 500)
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
    expected = plain_random(4, 100)
    actual = expected + 0.5 * plain_random(4, 100, seed=1)
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
    expected = plain_random(2, 50)

    assert compare_whole(-expected, expected).cosine.tolist() == pytest.approx([-1.0, -1.0])


UNIT = 2.0**-8


def logits(*values: float) -> Tensor:
    """One token of one prompt."""
    return torch.tensor([[values]], dtype=torch.float64)


def random(tokens: int = 64, vocabulary: int = 100, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(1, tokens, vocabulary, generator=generator)


def noisy(expected: Tensor, size: float = 0.01, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return expected + size * torch.randn(expected.shape, generator=generator)


def judged(actual: Tensor, expected: Tensor) -> dict[str, Ratio]:
    ratios = judge_logits(
        compare_logits(actual, expected), compare_logits(noisy(expected), expected), UNIT
    )
    return {ratio.statistic: ratio for ratio in ratios}


# P = (1/2, 1/3, 1/6), Q = (1/2, 1/6, 1/3), as logits.
P = logits(math.log(3), math.log(2), math.log(1))
Q = logits(math.log(3), math.log(1), math.log(2))


def only(values: Tensor) -> float:
    assert values.shape == (1, 1)
    return float(values)


def test_metrics_are_those_worked_out_by_hand() -> None:
    metrics = compare_logits(Q, P)

    # sum P ln(P/Q) = 1/3 ln 2 + 1/6 ln 1/2
    assert only(metrics.kl) == pytest.approx(math.log(2) / 6)
    assert only(metrics.top1) == 1.0
    assert only(metrics.top_k) == 1.0
    assert only(metrics.max_difference) == pytest.approx(math.log(2))
    a, b = math.log(3), math.log(2)
    assert only(metrics.cosine) == pytest.approx(a * a / (a * a + b * b))
    # Differences (0, -ln 2, ln 2): their mean is zero.
    assert only(metrics.error) == pytest.approx(math.log(2) * math.sqrt(2 / 3))
    mean = (a + b) / 3
    spread = math.sqrt(((a - mean) ** 2 + (b - mean) ** 2 + mean**2) / 3)
    assert only(metrics.scale) == pytest.approx(spread)
    assert only(metrics.relative_error) == pytest.approx(math.log(2) * math.sqrt(2 / 3) / spread)


def test_published_metrics_are_those_worked_out_by_hand() -> None:
    metrics = compare_logits(Q, P)

    # -sum Q ln P = 1/2 ln 2 + 1/6 ln 3 + 1/3 ln 6
    cross_entropy = math.log(2) / 2 + math.log(3) / 6 + math.log(6) / 3
    assert only(metrics.cross_entropy) == pytest.approx(cross_entropy)
    # P/Q = (1, 2, 1/2)
    assert only(metrics.prob_mean) == pytest.approx(3.5 / 3 - 1)
    mean = 3.5 / 3
    variance = ((1 - mean) ** 2 + (2 - mean) ** 2 + (0.5 - mean) ** 2) / 2
    assert only(metrics.prob_std) == pytest.approx(math.sqrt(variance))
    assert only(metrics.diff_mean) == pytest.approx((1 / 6 + 1 / 6) / 3)


def test_published_metrics_look_at_the_k_largest_of_the_reference() -> None:
    metrics = compare_logits(Q, P, k=2)

    # P = (3/5, 2/5), Q = (3/4, 1/4) over those two alone.
    assert only(metrics.diff_mean) == pytest.approx(0.15)
    assert only(metrics.cross_entropy) == pytest.approx(
        -0.75 * math.log(0.6) - 0.25 * math.log(0.4)
    )
    # Q's two largest are ids 0 and 2.
    assert only(metrics.top_k) == 0.5


def test_swapped_arguments_give_another_number() -> None:
    flat, peaked = logits(0.0, 0.0), logits(math.log(3), 0.0)

    # KL((1/2, 1/2), (3/4, 1/4)) and KL((3/4, 1/4), (1/2, 1/2)).
    assert only(compare_logits(peaked, flat).kl) == pytest.approx(math.log(4 / 3) / 2)
    assert only(compare_logits(flat, peaked).kl) == pytest.approx(
        0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    )


def test_constant_added_to_all_logits_changes_no_probability() -> None:
    metrics = compare_logits(P + 7.0, P)

    assert only(metrics.kl) == pytest.approx(0.0, abs=1e-15)
    assert only(metrics.error) == pytest.approx(0.0, abs=1e-12)
    assert only(metrics.max_difference) == pytest.approx(7.0)


def test_divergence_of_far_apart_distributions_is_finite() -> None:
    assert only(compare_logits(logits(0.0, 2000.0), logits(0.0, 0.0)).kl) == pytest.approx(
        1000 - math.log(2)
    )


def test_divergence_of_nearly_equal_logits_is_not_lost_to_rounding() -> None:
    expected = random(8).double()
    delta = 1e-12 * random(8, seed=5).double()

    kl = compare_logits(expected + delta, expected).kl

    # KL of a small change d is half its variance under P.
    p = expected.softmax(-1)
    mean = (p * delta).sum(-1, keepdim=True)
    assert torch.allclose(kl, (p * (delta - mean) ** 2).sum(-1) / 2, rtol=1e-3, atol=0)


@pytest.mark.parametrize("tokens", [1, 64, 65, 200])
def test_chunks_of_tokens_do_not_show(tokens: int) -> None:
    expected = random(tokens)
    actual = noisy(expected)

    whole = compare_logits(actual, expected)

    for token in (0, tokens - 1):
        single = compare_logits(actual[:, token : token + 1], expected[:, token : token + 1])
        for name in vars(whole):
            assert getattr(whole, name)[0, token] == pytest.approx(only(getattr(single, name)))


def test_denormal_logits_are_a_flat_distribution() -> None:
    tiny = torch.full((1, 1, 4), 1e-40)

    metrics = compare_logits(tiny, tiny)

    assert only(metrics.kl) == 0.0
    assert only(metrics.cross_entropy) == pytest.approx(math.log(4))


def test_all_zero_logits_agree_with_themselves() -> None:
    zeros = torch.zeros(1, 1, 4)

    metrics = compare_logits(zeros, zeros)

    assert (only(metrics.kl), only(metrics.relative_error), only(metrics.top1)) == (0.0, 0.0, 1.0)


def test_vocabulary_of_one_has_no_choice() -> None:
    metrics = compare_logits(logits(3.0), logits(1.0))

    assert (only(metrics.kl), only(metrics.prob_std), only(metrics.top1)) == (0.0, 0.0, 1.0)


# The eight faults


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["one logit", "all logits"])
def test_fault_1_logits_that_are_not_finite_never_pass(value: float, where: str) -> None:
    expected = random()
    actual = expected.clone()
    if where == "one logit":
        actual[0, 3, 7] = value
    else:
        actual[:] = value

    metrics = compare_logits(actual, expected)

    for name in vars(metrics):
        if name != "scale":
            assert math.isnan(getattr(metrics, name)[0, 3]), name
    assert failure_rate(metrics.kl, 1e30) == pytest.approx(1 / 64 if where == "one logit" else 1)
    assert [ratio.value for ratio in judged(actual, expected).values()] == [math.inf] * 4


def test_fault_2_identical_flat_logits_have_no_divergence() -> None:
    flat = torch.zeros(1, 64, 100)

    metrics = compare_logits(flat, flat)

    # The published cross-entropy holds the entropy of the model itself: ln 20.
    assert metrics.cross_entropy[0, 0] == pytest.approx(math.log(TOP_K))
    assert [ratio.value for ratio in judged(flat, flat).values()] == [0.0] * 4


def test_fault_3_logit_outside_of_the_largest_k_is_seen() -> None:
    expected = random()
    actual = noisy(expected, seed=2)
    outside = int(expected[0, 5].argsort(descending=True)[TOP_K])
    published_before = compare_logits(actual, expected)
    actual[0, 5, outside] += 100.0

    metrics = compare_logits(actual, expected)

    for name in ("cross_entropy", "prob_mean", "prob_std", "diff_mean"):
        assert getattr(metrics, name)[0, 5] == pytest.approx(getattr(published_before, name)[0, 5])
    assert float(metrics.kl[0, 5]) > 10.0
    assert metrics.top1[0, 5] == 0.0
    assert judged(actual, expected)["logits-kl-worst"].value > 1000


def test_fault_4_calibration_data_pass_their_own_judgement() -> None:
    expected = random()

    ratios = judged(noisy(expected), expected)

    assert all(ratio.value <= 1.0 for ratio in ratios.values())


@pytest.mark.parametrize("change", ["permuted", "negated"])
def test_fault_5_permuted_and_negated_vocabularies_fail(change: str) -> None:
    expected = random()
    actual = -expected if change == "negated" else expected.roll(1, -1)

    assert all(ratio.value > 20 for ratio in judged(actual, expected).values())


@pytest.mark.parametrize("shape", [(1, 63, 100), (1, 1, 100), (1, 64, 99), (2, 64, 100)])
def test_fault_6_logits_of_other_lengths_are_not_zipped(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeMismatchError, match="actual has shape"):
        compare_logits(torch.zeros(shape), random())


# Fault 7, stale references: see test_candidate.py and the subsystem tests of goldens.


def test_fault_8_logits_are_not_kept_twice() -> None:
    alive: list[int] = []

    class Step:
        """Stands for the logits of one step."""

        shape = (2, 5)
        dtype = torch.float32

        def cpu(self) -> Tensor:
            alive.append(len([ref for ref in references if ref() is not None]))
            return torch.zeros(2, 5)

    steps: list[Any] = [Step() for _ in range(4)]
    references = [weakref.ref(step) for step in steps]

    assert _stack(steps).shape == (2, 4, 5)
    assert sorted(alive) == [1, 2, 3, 4]  # each was let go before the next was copied


def test_stacked_logits_are_in_the_order_of_the_steps() -> None:
    steps = [torch.full((2, 3), float(number)) for number in range(4)]

    assert _stack(steps)[1, :, 2].tolist() == [0.0, 1.0, 2.0, 3.0]


# Judging


def test_larger_noise_is_a_larger_ratio() -> None:
    expected = random(256)

    ratios = judged(noisy(expected, 0.05, seed=3), expected)

    # Five times the noise: an error of 5 times, a divergence of 25 times.
    assert ratios["logits-error"].value == pytest.approx(5, rel=0.05)
    assert ratios["logits-kl"].value == pytest.approx(25, rel=0.1)


def test_fault_in_one_token_shows_in_the_worst_token() -> None:
    expected = random(1000)
    actual = noisy(expected, seed=4)
    actual[0, 500] = noisy(expected, 0.1, seed=5)[0, 500]

    ratios = judged(actual, expected)

    assert ratios["logits-error"].value < 1.1
    assert ratios["logits-worst"].value > 5
    assert ratios["logits-kl"].value < 1.3
    assert ratios["logits-kl-worst"].value > 4


def test_lucky_noise_has_the_floor_of_half_a_unit() -> None:
    expected = random()
    exact = compare_logits(expected, expected)

    error, worst, kl, kl_worst = judge_logits(exact, exact, UNIT)

    spread = float(exact.scale.pow(2).mean().sqrt())
    assert error.expected == worst.expected == UNIT / 2
    # A relative error r of logits of spread s gives a divergence of (r s)**2 / 2.
    assert kl.expected == kl_worst.expected == pytest.approx((UNIT / 2 * spread) ** 2 / 2)


def test_two_float64_runs_are_not_judged_by_rounding_of_the_metric() -> None:
    expected = random().double()
    actual = expected + 1e-16 * noisy(random(seed=8)).double()

    ratios = judge_logits(
        compare_logits(actual, expected), compare_logits(expected, expected), 2.0**-53
    )

    assert all(ratio.value < 20 for ratio in ratios)


@pytest.mark.parametrize(
    ("values", "threshold", "expected"),
    [
        ([0.1, 0.2, 0.3, 0.4], 0.25, 0.5),
        ([0.1, 0.25], 0.25, 0.5),  # at the threshold is a failure
        ([math.nan, 0.1], 1.0, 0.5),
        ([math.inf], 1.0, 1.0),
        ([0.1], math.inf, 0.0),
    ],
)
def test_failure_rate_is_the_share_at_or_over_the_threshold(
    values: list[float], threshold: float, expected: float
) -> None:
    assert failure_rate(torch.tensor(values), threshold) == expected


def test_failure_rate_of_nothing_is_no_number() -> None:
    assert math.isnan(failure_rate(torch.zeros(0), 1.0))


class Result(SimpleNamespace):
    """Can be referred to weakly."""


def test_result_of_generation_is_not_held_while_logits_are_stacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.result: Any = None

        def generate(self, input_ids: Tensor, **_options: Any) -> Any:
            result = Result(
                sequences=torch.cat([input_ids, input_ids], 1),
                logits=(torch.zeros(1, 5), torch.zeros(1, 5)),
            )
            self.result = weakref.ref(result)
            return result

    model = Model()
    held: list[bool] = []

    def stack(steps: list[Tensor]) -> Tensor:
        held.append(model.result() is not None)
        return _stack(steps)

    monkeypatch.setattr(driving, "_stack", stack)
    loaded: Any = SimpleNamespace(model=model, can_generate=True, pad_token_id=0, eos_token_ids=())

    generated = driving.generate(loaded, Batch(0, ((1, 2),), (0,), 0, 2))

    assert generated.logits.shape == (1, 2, 5)
    assert held == [False]
