"""The labels that a loss used, derived from its gradient at the logits.

The gradient of a cross entropy is negative at the label alone, and zero where the label is masked.

Shape legend: B rows, T positions, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from assay.sites import CallSite, RowMap
from assay.stages import LabelFault

_MASKED, _UNCLEAR = -1, -2

# Gradients below this share of the largest in the call may be rounding of a confident prediction.
_SMALLEST = 0.01

# In repetitive text, some labels stay the same after a shift by one.
_ALIKE = 0.9


@dataclass(frozen=True, slots=True)
class LabelDifference:
    """Labels of one row of a micro-batch that differ from the reference's."""

    step: int
    micro_batch: int
    row: int
    fault: LabelFault
    count: int
    """Number of wrong labels."""


def find_label_differences(
    site: CallSite, actual_BTV: Tensor, expected_BTV: Tensor, rows: RowMap | None
) -> Iterator[LabelDifference]:
    """Compare the labels behind two gradients at the logits of a call.

    Other ports give an empty result. So does a gradient that is zero everywhere, not finite, or of a
    loss other than a cross entropy with one label, such as one with label smoothing.
    """
    if rows is None or expected_BTV.shape[:-1] != (rows.num_rows, rows.length):
        return
    expected_BT, actual_BT = _labels(expected_BTV), _labels(actual_BTV)
    if not bool((actual_BT >= 0).any()):
        return
    for gradient_BTV, labels_BT in ((expected_BTV, expected_BT), (actual_BTV, actual_BT)):
        num_negative_BT = (gradient_BTV < 0).sum(-1)
        if bool((num_negative_BT[labels_BT >= 0] != 1).any()):
            return
    shift = _find_shift(actual_BT, expected_BT)
    # The gradient at a position belongs to the label of the next position.
    ends = torch.full((rows.num_rows, 1), -1)
    is_padding = torch.cat([torch.tensor(rows.positions)[:, 1:], ends], 1) < 0
    unmasked = (actual_BT >= 0) & (expected_BT == _MASKED)
    both = (actual_BT >= 0) & (expected_BT >= 0)
    faults: dict[LabelFault, Tensor] = {
        "prompt": unmasked & ~is_padding,
        "padding": unmasked & is_padding,
        "masked": (actual_BT == _MASKED) & (expected_BT >= 0),
        "other": both & (actual_BT != expected_BT),
    }
    if shift is not None:
        faults = {shift: actual_BT >= 0}
    for fault, is_wrong_BT in faults.items():
        for row, count in enumerate(is_wrong_BT.sum(1).tolist()):
            if count:
                yield LabelDifference(site.step, site.micro_batch, row, fault, count)


def _labels(gradient_BTV: Tensor) -> Tensor:
    """Return the label behind the gradient of each position, (B, T)."""
    size_BT = gradient_BTV.abs().amax(-1)
    labels_BT = gradient_BTV.argmin(-1)
    labels_BT[~(size_BT > _SMALLEST * size_BT.max())] = _UNCLEAR
    labels_BT[size_BT == 0] = _MASKED
    return labels_BT


def _find_shift(actual_BT: Tensor, expected_BT: Tensor) -> LabelFault | None:
    """Return the shift that makes most labels equal the reference's, if they differ without it."""
    if _share_alike(actual_BT, expected_BT) >= _ALIKE:
        return None
    if _share_alike(actual_BT[:, 1:], expected_BT[:, :-1]) >= _ALIKE:
        return "not-shifted"
    if _share_alike(actual_BT[:, :-1], expected_BT[:, 1:]) >= _ALIKE:
        return "shifted-twice"
    return None


def _share_alike(actual_BT: Tensor, expected_BT: Tensor) -> float:
    both = (actual_BT >= 0) & (expected_BT >= 0)
    return float((actual_BT == expected_BT)[both].double().mean()) if bool(both.any()) else 0.0
