"""The losses of a training step, each a sum over labels that is divided by their number.

Shape legend: B rows, T positions, V tokens or classes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from assay.training.protocol import NEXT_TOKEN

# The label of a masked token. Source: torch.nn.functional.cross_entropy.
IGNORED = -100


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss over labels."""

    total: Callable[[Tensor, Tensor, Any], Tensor]
    """Sum of the losses of all labels, from logits, labels and the model's configuration."""
    count: Callable[[Tensor], int] = lambda labels: int((labels != IGNORED).sum())
    """Number of labels that count."""


def _cross_entropy(logits: Tensor, labels: Tensor, _config: object) -> Tensor:
    return functional.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def _next_token(logits_BTV: Tensor, labels_BT: Tensor, config: object) -> Tensor:
    return _cross_entropy(logits_BTV[:, :-1], labels_BT[:, 1:], config)


def _squares(logits: Tensor, labels: Tensor, _config: object) -> Tensor:
    return (logits.reshape(labels.shape) - labels).square().sum()


def _binary(logits: Tensor, labels: Tensor, _config: object) -> Tensor:
    targets = labels.to(logits.dtype)
    return functional.binary_cross_entropy_with_logits(logits, targets, reduction="sum")


def _ctc_rows(logits_BTV: Tensor, labels: Tensor, config: Any) -> Tensor:  # noqa: ANN401 - of any model
    is_label = labels >= 0
    return functional.ctc_loss(
        logits_BTV.log_softmax(-1).transpose(0, 1),
        labels[is_label],
        torch.full((len(labels),), logits_BTV.shape[1]),
        is_label.sum(1).cpu(),
        blank=config.pad_token_id,
        reduction="none",
        zero_infinity=bool(getattr(config, "ctc_zero_infinity", False)),
    )


LOSSES: Mapping[str, Loss] = {
    NEXT_TOKEN: Loss(_next_token, lambda labels: int((labels[:, 1:] != IGNORED).sum())),
    "token": Loss(_cross_entropy),
    "class": Loss(_cross_entropy),
    "multi-label": Loss(_binary),
    "regression": Loss(_squares),
    "ctc": Loss(lambda *given: _ctc_rows(*given).sum()),
    # Each row's loss is divided by the number of its labels, and the rows count.
    "ctc-mean": Loss(
        lambda logits, labels, config: (
            _ctc_rows(logits, labels, config) / (labels >= 0).sum(1)
        ).sum(),
        len,
    ),
}


def add_losses(name: str, logits: Tensor, labels: Tensor, config: object) -> Tensor:
    """Return the summed loss `name` of logits and labels, computed at least in float32.

    In bfloat16 the sum over the vocabulary would have the largest error.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return LOSSES[name].total(logits, labels, config)
