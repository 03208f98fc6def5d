"""Images and sounds that a model takes, alone or inside a text, and the other tensors that it needs."""

from assay.media.finding import (
    encode_images,
    find_input_limits,
    find_processing,
    model_inputs,
    on_model,
)
from assay.media.lacking import with_additions

__all__ = [
    "encode_images",
    "find_input_limits",
    "find_processing",
    "model_inputs",
    "on_model",
    "with_additions",
]
