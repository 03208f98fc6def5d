"""Write a model as a Hugging Face folder."""

from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from assay.models.transformers_logging import quiet_transformers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


def save_pretrained(
    model: Any,  # noqa: ANN401 - transformers
    folder: Path,
    state: "Mapping[str, Tensor] | None" = None,
) -> None:
    """Write `model` into `folder` on every rank that calls this.

    state: weights to write instead of the model's own.
    """
    from transformers import modeling_utils

    with (
        quiet_transformers(),
        # transformers writes only on rank 0; the folder of another rank would stay empty.
        mock.patch.object(model, "should_save_on_this_rank", return_value=True, create=True),
        # The original imports DeepSpeed to look for a wrapper, which lacks `save_pretrained`.
        mock.patch.object(modeling_utils, "unwrap_model", lambda unwrapped: unwrapped),
    ):
        model.save_pretrained(folder, state_dict=state)
