"""Which models cannot be trained as a single process trains them, since dropout draws other masks."""

from typing import TYPE_CHECKING, cast

from torch import nn

from assay.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def require_no_dropout(model: nn.Module, why: str) -> None:
    """Raise UsageError for a model whose configuration asks for dropout.

    why: masks are others than those of the reference, and what to do.
    """
    drawn = [
        f"{name} {value}"
        for name, value in cast("PreTrainedModel", model).config.to_dict().items()
        # GPT-2 has attn_pdrop, embd_pdrop and resid_pdrop; summaries are a classifier's.
        if name.endswith(("dropout", "pdrop"))
        and not name.startswith("summary")
        and isinstance(value, float | int)
        and value > 0
    ]
    if drawn:
        raise UsageError(f"{', '.join(drawn)}: {why}")
