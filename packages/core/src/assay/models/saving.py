"""Writing a model as a Hugging Face folder."""

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
    """Write `model` into `folder`, on every rank that calls this; state: instead of its own."""
    from transformers import modeling_utils

    with (
        quiet_transformers(),
        # By itself transformers writes on rank 0 only: a folder of another rank would stay empty.
        mock.patch.object(model, "should_save_on_this_rank", return_value=True, create=True),
        # It imports DeepSpeed to see if `model` is a wrapper, which has no such method.
        mock.patch.object(modeling_utils, "unwrap_model", lambda unwrapped: unwrapped),
    ):
        model.save_pretrained(folder, state_dict=state)
