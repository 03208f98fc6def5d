"""Refuses models whose dropout would draw other masks than the reference's."""

from typing import TYPE_CHECKING, cast

from torch import nn

from assay.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def require_no_dropout(model: nn.Module, why: str) -> None:
    """Raise UsageError, with the reason `why`, for a model whose configuration has dropout."""
    drawn = [
        f"{name} {value}"
        for name, value in cast("PreTrainedModel", model).config.to_dict().items()
        # GPT-2 has attn_pdrop, embd_pdrop and resid_pdrop. The summary belongs to classifiers.
        if name.endswith(("dropout", "pdrop"))
        and not name.startswith("summary")
        and isinstance(value, float | int)
        and value > 0
    ]
    if drawn:
        raise UsageError(f"{', '.join(drawn)}: {why}")
