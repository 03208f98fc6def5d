"""Encode texts with images by the processor in a model's folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from assay.errors import UsageError
from assay.models.sources import ModelSource, local_folder
from assay.models.transformers_calls import quiet_transformers

_FILES = ("processor_config.json", "preprocessor_config.json")

Layout = Literal["batch", "strip", "row", "token"]


@dataclass(frozen=True, slots=True)
class EncodedText:
    """The token ids of a text with its images, and the tensors of the images."""

    ids: tuple[int, ...]
    tensors: Mapping[str, Tensor]
    """By argument of the model. The first dim counts images, patches or tokens."""
    layouts: Mapping[str, Layout]


class ImageProcessing:
    """A processor of transformers, applied to one text at a time."""

    def __init__(self, processor: Any, placeholder: int) -> None:  # noqa: ANN401 - of transformers
        self._processor = processor
        self._tokenizer = processor.tokenizer
        names = ("boi_token", "image_token")  # Gemma's image token is not one of its texts
        tokens = [getattr(processor, name, None) for name in names]
        found = [str(one) for one in tokens if one and self._reads_as(str(one), placeholder)]
        if not found:
            raise UsageError("its image token is not that of the model")
        self.token = found[0]
        one = self._call(self.token, [_gray()])
        two = self._call(2 * self.token, [_gray(), _gray()])
        self._are_strips = frozenset(
            name
            for name, value in two.items()
            if value.ndim == 4 and value.shape == (*one[name].shape[:3], 2 * one[name].shape[3])
        )
        # Otherwise the first dim counts at least two images.
        self._has_rows = frozenset(name for name, value in two.items() if value.shape[0] == 1)

    def encode(self, text: str, images: Sequence[Any]) -> EncodedText:
        """Encode a text with as many of `token` as it has images, or with none: they then come first.

        images: of PIL.
        Raises: what the processor raises.
        """
        if self.token not in text:
            text = len(images) * self.token + text
        values = self._call(text, images)
        ids = tuple(values.pop("input_ids")[0].tolist())
        values.pop("attention_mask", None)
        layouts: dict[str, Layout] = {}
        for name, value in values.items():
            if name in self._are_strips:
                layouts[name] = "strip"
            elif name in self._has_rows:
                is_of_tokens = value.ndim > 1 and value.shape[1] == len(ids)
                layouts[name] = "token" if is_of_tokens else "row"
            else:
                layouts[name] = "batch"
        return EncodedText(
            ids,
            {
                name: one if layouts[name] in ("batch", "strip") else one[0]
                for name, one in values.items()
            },
            layouts,
        )

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Encode a text without images."""
        return tuple(self._tokenizer.encode(text))

    def apply_chat(self, text: str, num_images: int) -> str:
        """Return the text of a user's message, with its images first, in the chat template."""
        parts = [{"type": "image"}] * num_images + [{"type": "text", "text": text}]
        rendered = self._processor.apply_chat_template(
            [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
        )
        return str(rendered)

    def _reads_as(self, token: str, placeholder: int) -> bool:
        try:
            return placeholder in self._call(token, [_gray()])["input_ids"]
        except Exception:  # noqa: BLE001 - code of a processor
            return False

    def _call(self, text: str, images: Sequence[Any]) -> dict[str, Tensor]:
        with quiet_transformers():
            found = self._processor(text=[text], images=[[*images]], return_tensors="pt")
        return {
            name: value for name, value in found.items() if isinstance(value, Tensor) and value.ndim
        }


def _gray() -> Any:  # noqa: ANN401 - PIL is not imported for texts
    from PIL import Image

    return Image.new("RGB", (64, 48), (90, 120, 150))


def draw_image(generator: torch.Generator, height: int, width: int) -> Any:  # noqa: ANN401 - as `_gray`
    """Return an image of random colors, with a gradient that tells its sides apart."""
    from PIL import Image

    noise_HWC = torch.randint(0, 128, (height, width, 3), generator=generator)
    down_H, right_W = torch.linspace(0, 100, height), torch.linspace(0, 27, width)
    values_HWC = noise_HWC + down_H[:, None, None] + right_W[None, :, None]
    return Image.frombytes("RGB", (width, height), bytes(values_HWC.byte().flatten().tolist()))


def load_image_processing(source: ModelSource, placeholder: int) -> ImageProcessing:
    """Load the processor in the folder of a model.

    placeholder: the token of an image.
    Raises: UsageError without one; what transformers raises, such as ImportError for a missing package.
    """
    with local_folder(source, "refuse") as folder:
        if not any((folder / name).is_file() for name in _FILES):
            raise UsageError(f"the folder has no {_FILES[0]}")
        from transformers import AutoProcessor

        with quiet_transformers():
            processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
        return ImageProcessing(processor, placeholder)
