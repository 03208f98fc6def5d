"""Find the shape of the images, videos or sounds that a model takes."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from assay.errors import UsageError
from assay.inputs import Media
from assay.models import LoadedModel
from assay.models.config_files import first_line

# Samples of a sound: a quarter of a second at 16 kHz. Frames of a spectrogram: a second.
_NUM_SAMPLES, _NUM_FRAMES = 4000, 100


@torch.no_grad()
def find_media(loaded: LoadedModel) -> Media:
    """Return an input of a shape that the model takes, tried on the model in the order of likelihood.

    Raises: UsageError if it takes none of them.
    """
    model: Any = loaded.model
    parameter = next(model.parameters())
    error: Exception | None = None
    for shape in _likely_shapes(loaded.media_input, model):
        media = Media(loaded.media_input, shape)
        inputs = {media.name: media.values.to(parameter.device, parameter.dtype)}
        ids = torch.tensor([loaded.decoder_start or (1, 2, 3)], device=parameter.device)
        if loaded.decoder_start:
            inputs["decoder_input_ids"] = ids
        elif loaded.reads_tokens:
            inputs |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        try:
            model(**inputs)
        except Exception as raised:  # noqa: BLE001 - model code raises anything
            error = error or raised
        else:
            return media
    reason = f": {first_line(error)}" if error is not None else ""
    name = type(model).__name__
    raise UsageError(f"{name} takes {loaded.media_input} of a shape that is not known{reason}")


def _likely_shapes(name: str, model: nn.Module) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of one row of the argument `name`, without its batch."""
    config: Any = model.config
    parts = [config, *(getattr(config, part, None) for part in ("vision_config", "encoder"))]

    def read(*keys: str) -> Any:  # noqa: ANN401 - a value of a configuration
        found = (getattr(part, key, None) for key in keys for part in parts if part is not None)
        return next((value for value in found if value is not None), None)

    if name.startswith("pixel_values"):
        size = read("image_size", "input_size", "img_size") or 64
        image = (
            read("num_channels") or 3,
            *(size if isinstance(size, list | tuple) else (size,) * 2),
        )
        num_frames = read("num_frames", "frames_per_clip")
        if num_frames is not None:
            yield num_frames, *image
        yield image
    elif name == "input_values":
        if read("num_mel_bins") is not None:
            yield read("max_length") or _NUM_FRAMES, read("num_mel_bins")
        yield (_NUM_SAMPLES,)
        yield read("audio_channels") or 1, _NUM_SAMPLES
    elif name in ("input_features", "audio_features", "features"):
        width = read("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel")
        positions = read("max_source_positions")
        if width is not None and positions is not None:
            yield width, 2 * positions
        if width is not None:
            yield _NUM_FRAMES, width
