"""Labels are read off the gradient that a cross entropy gives the logits."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from assay.locating.label_gradients import LabelDifference, find_label_differences
from assay.sites import CallSite, RowMap

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
