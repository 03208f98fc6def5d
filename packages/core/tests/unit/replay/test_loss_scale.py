"""The factor on a loss, and the labels behind its gradient."""

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from assay.replay.gradients import (
    GradientScale,
    LabelDifference,
    LossScale,
    ScaledStep,
    find_label_differences,
    is_scaled_alike,
    was_read_scaled,
)
from assay.sites import CallSite, RowMap

UNIT = 2.0**-8  # unit roundoff of bfloat16
GRADIENT = torch.linspace(-1, 1, 1000, dtype=torch.float64)[:, None]


def scale(
    factor: float, *, step: int = 0, micro_batch: int = 0, rest: float = 0.0, of_caller: float = 1.0
) -> GradientScale:
    return GradientScale(step, micro_batch, factor - 1, rest, of_caller)


def test_scale_of_a_gradient_is_its_length_and_what_is_left() -> None:
    across = torch.ones_like(GRADIENT) * float(GRADIENT.norm() / math.sqrt(1000))

    found = GradientScale.of(CallSite(1, "", micro_batch=2), 4 * GRADIENT + across, GRADIENT, 0.5)

    assert (found.step, found.micro_batch, found.loss_gradient) == (1, 2, 0.5)
    assert found.factor == pytest.approx(4)
    assert found.rest == pytest.approx(1)  # as long as the expected gradient, and across it


@pytest.mark.parametrize(
    ("scales", "alike"),
    [
        ([scale(2.0), scale(2.0, micro_batch=1)], True),
        ([scale(65536.0, rest=500.0), scale(65536.0, micro_batch=1)], True),  # rest is relative
        ([scale(2.0, rest=0.036), scale(2.034, micro_batch=1)], True),  # 1.7% apart, known to 1.8%
        ([scale(2.0, rest=0.036), scale(2.038, micro_batch=1)], False),
        ([scale(2.0), scale(2.034, micro_batch=1)], False),
        ([scale(2.0), scale(4.0, step=1)], True),  # each step has its own
        ([scale(1.0, of_caller=0.5), scale(1.0, micro_batch=1, of_caller=0.5)], True),
        ([scale(1.0), scale(1.0, micro_batch=1)], False),  # there is none
        ([scale(1 + 3 * UNIT)], False),  # no more than rounding
        ([scale(2.0), scale(3.0, micro_batch=1)], False),  # means of micro-batches
        ([scale(2.0), scale(1.0, micro_batch=1)], False),
        ([scale(2.0, of_caller=2.0), scale(2.0, micro_batch=1)], False),
        ([scale(2.0, rest=0.05)], False),  # more than a length is wrong
        ([scale(2.0, rest=math.nan)], False),
        ([scale(-2.0)], False),
        ([scale(0.0)], False),  # no gradient at all
        ([], False),
    ],
)
def test_only_one_factor_for_all_micro_batches_of_a_step_is_a_scale(
    scales: list[GradientScale], *, alike: bool
) -> None:
    assert is_scaled_alike(scales, UNIT) is alike


@pytest.mark.parametrize(
    ("found", "factor", "of_loss"),
    [
        (scale(2.0), 2.0, 2.0),
        (scale(65536 * (1 + UNIT / 2), of_caller=65536.0), 65536.0, 1.0),
        (scale(1 / 3 + 0.001), 1 / 3, 1 / 3),
        (scale(1.0001, of_caller=0.5), 1.0, 2.0),  # the caller of compute_loss halves it
        (scale(133.2), 133.2, 133.2),  # whole numbers are too near to each other
        (scale(1.37), 1.37, 1.37),
        (scale(math.nan), 1.0, 1.0),
        (scale(-2.0), 1.0, 1.0),
    ],
)
def test_factor_is_the_whole_number_that_it_is_but_for_rounding(
    found: GradientScale, factor: float, of_loss: float
) -> None:
    steps = LossScale(UNIT)
    steps.begin_step()
    steps.learn(found)

    assert steps.factor == pytest.approx(factor)
    assert steps.of_loss == pytest.approx(of_loss)
    assert steps.of_gradients == steps.factor


def test_first_backward_of_a_step_decides() -> None:
    steps = LossScale(UNIT)
    steps.begin_step()
    steps.learn(scale(2.0))
    steps.learn(scale(3.0, micro_batch=1))
    assert steps.factor == 2.0

    steps.begin_step()
    assert steps.factor == 1.0
    steps.learn(scale(4.0, step=1))

    assert [(step.step, step.factor) for step in steps.steps] == [(0, 2.0), (1, 4.0)]


def ended(factor: float, *lengths: float, num_ranks: int = 1) -> LossScale:
    """After as many phases as `lengths`: how long gradients are after each."""
    steps = LossScale(UNIT, num_ranks)
    steps.begin_step()
    steps.learn(scale(factor))
    for phase, length in zip(("backward", "reduce", "clip"), lengths, strict=False):
        gradient: Tensor = length * GRADIENT
        steps.end_phase(phase, [(gradient.bfloat16(), GRADIENT)])  # type: ignore[arg-type]
    return steps


@pytest.mark.parametrize(
    ("lengths", "phase"),
    [
        ((1.0,), "backward"),
        ((8.0, 1.0), "reduce"),
        ((8.0, 8.0, 1.0), "clip"),
        ((8.0, 0.5), "reduce"),  # by another factor: an error that is seen there
        ((8.0, 8.0, 8.0), None),
        ((8.0, 7.0), None),
        ((math.nan, math.inf), None),
    ],
)
def test_factor_is_off_after_the_phase_whose_gradients_are_nearer_without_it(
    lengths: tuple[float, ...], phase: str | None
) -> None:
    steps = ended(8.0, *lengths)

    assert steps.steps[0].taken_off == phase
    assert steps.of_gradients == (8.0 if phase is None else 1.0)


@pytest.mark.parametrize(
    ("lengths", "averaged", "taken_off", "left"),
    [
        # A loss times 4 ranks and a scale of 1024.
        ((1024.0, 1024.0, 1.0), "backward", "clip", 1.0),
        ((4096.0, 1024.0, 1.0), "reduce", "clip", 1.0),
        ((4096.0, 4096.0, 1.0), None, "clip", 1.0),
        ((1024.0, 1.0), "backward", "reduce", 1.0),
        # Averaged once, and once too often: an error that is seen after clipping.
        ((1024.0, 256.0), "backward", None, 1024.0),
        ((1024.0, 256.0, 0.25), "backward", "clip", 1.0),
    ],
)
def test_mean_over_ranks_takes_their_number_off_and_another_phase_the_scale(
    lengths: tuple[float, ...], averaged: str | None, taken_off: str | None, left: float
) -> None:
    steps = ended(4096.0, *lengths, num_ranks=4)

    assert steps.steps[0].averaged == averaged
    assert steps.steps[0].taken_off == taken_off
    assert steps.of_gradients == left


def test_factor_that_is_the_number_of_ranks_is_taken_off_by_their_mean() -> None:
    steps = ended(4.0, 1.0, num_ranks=4)

    assert steps.steps[0].averaged is None
    assert steps.steps[0].taken_off == "backward"


def test_one_parameter_that_keeps_the_factor_is_not_all_of_them() -> None:
    steps = LossScale(UNIT)
    steps.begin_step()
    steps.learn(scale(65536.0))

    steps.end_phase(
        "reduce", [(GRADIENT, GRADIENT), (65536 * GRADIENT, GRADIENT), *[(GRADIENT, GRADIENT)] * 2]
    )

    assert steps.steps[0].taken_off == "reduce"


@pytest.mark.parametrize(
    ("lengths", "left"),
    [
        ([0.5] * 4, 0.5),
        ([0.5] * 3 + [8.0], 0.5),  # one parameter is something else
        ([0.3, 0.5, 0.7, 0.9], None),  # parts of a sum
    ],
)
def test_length_that_is_left_is_that_of_most_gradients(
    lengths: list[float], left: float | None
) -> None:
    steps = LossScale(UNIT)
    steps.begin_step()
    steps.learn(scale(65536.0))

    steps.end_phase("reduce", [(length * GRADIENT, GRADIENT) for length in lengths])

    assert steps.steps[0].left == (left if left is None else pytest.approx(left))


@pytest.mark.parametrize(
    ("norm", "scaled"), [(8.0, True), (1.0, False), (4.0, True), (math.nan, False), (None, False)]
)
def test_norm_shows_whether_clipping_read_scaled_gradients(
    norm: float | None, *, scaled: bool
) -> None:
    assert was_read_scaled(ScaledStep(0, 8.0, 1.0, norm=norm)) is scaled


VOCABULARY, LENGTH, PAD = 11, 6, 0
# Row 0 is padded on the left by one token and row 1 is not; each has a prompt of two tokens.
IDS = torch.tensor([[PAD, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 1]])
POSITIONS = ((-1, 0, 1, 2, 3, 4), (0, 1, 2, 3, 4, 5))
LABELS = torch.tensor([[-100, -100, -100, 3, 4, 5], [-100, -100, 8, 9, 10, 1]])
SITE = CallSite(2, "", micro_batch=1)
ROWS = RowMap((3, 4), POSITIONS)


def gradient(labels_BT: Tensor, smoothing: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, LENGTH, VOCABULARY, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    loss = functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten(), label_smoothing=smoothing
    )
    return torch.autograd.grad(loss, logits)[0]


def found(actual: Tensor, rows: RowMap | None = ROWS) -> list[LabelDifference]:
    return list(find_label_differences(SITE, actual, gradient(LABELS), rows))


def unmasked(labels: Tensor) -> Tensor:
    return IDS.masked_fill(torch.tensor(POSITIONS) < 0, -100) if labels is LABELS else labels


def padding_unmasked(labels: Tensor) -> Tensor:
    # The last position of a row that is padded on the right would be one; here the head of row 0.
    changed = labels.clone()
    changed[0, 1:3] = IDS[0, 1:3]
    return changed


def shifted(by: int) -> Callable[[Tensor], Tensor]:
    return lambda labels: labels.roll(by, 1)


def masked(labels: Tensor) -> Tensor:
    return labels.masked_fill(torch.arange(LENGTH) == 3, -100)


def another(labels: Tensor) -> Tensor:
    return torch.where((torch.arange(LENGTH) == 4) & (labels >= 0), 2, labels)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (unmasked, {("prompt", 0): 2, ("prompt", 1): 1}),
        (padding_unmasked, {("prompt", 0): 2}),
        (masked, {("masked", 0): 1, ("masked", 1): 1}),
        (another, {("other", 0): 1, ("other", 1): 1}),
        (shifted(1), {("not-shifted", 0): 2, ("not-shifted", 1): 3}),
        (shifted(-1), {("shifted-twice", 0): 3, ("shifted-twice", 1): 4}),
    ],
)
def test_every_fault_is_named_with_its_rows(
    change: Callable[[Tensor], Tensor], expected: dict[tuple[str, int], int]
) -> None:
    differences = found(gradient(change(LABELS)))

    counts: Counter[tuple[str, int]] = Counter()
    for one in differences:
        assert (one.step, one.micro_batch) == (2, 1)
        counts[one.fault, one.row] += one.count
    assert counts == expected


def test_padding_that_is_trained_on_is_no_prompt() -> None:
    right = RowMap((0, 1), ((0, 1, 2, 3, 4, -1), (0, 1, 2, 3, 4, 5)))
    without_last = LABELS.clone()
    without_last[0, 5] = -100

    differences = find_label_differences(SITE, gradient(LABELS), gradient(without_last), right)

    assert [(one.fault, one.row, one.count) for one in differences] == [("padding", 0, 1)]


@pytest.mark.parametrize("factor", [1.0, 0.5, 65536.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_right_labels_are_right_at_any_scale_and_rounding(
    factor: float, dtype: torch.dtype
) -> None:
    assert found((factor * gradient(LABELS)).to(dtype)) == []


def test_smoothing_changes_no_label() -> None:
    assert found(gradient(LABELS, smoothing=0.1)) == []


def test_gradient_without_values_shows_no_labels() -> None:
    assert found(torch.zeros(2, LENGTH, VOCABULARY)) == []
    assert found(torch.full((2, LENGTH, VOCABULARY), torch.nan)) == []


def test_gradient_of_something_else_than_logits_shows_no_labels() -> None:
    hidden = torch.randn(2, LENGTH, VOCABULARY, generator=torch.Generator().manual_seed(1))

    assert list(find_label_differences(SITE, gradient(LABELS), hidden, ROWS)) == []
    assert found(gradient(unmasked(LABELS)), rows=None) == []


def test_a_smoothed_loss_has_no_single_label_to_compare() -> None:
    assert found(gradient(unmasked(LABELS), smoothing=0.9)) == []
