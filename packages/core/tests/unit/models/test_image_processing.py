"""The layouts of a processor's tensors."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from assay.models.image_processing import ImageProcessing

IMAGE = 7


class Processor:
    """Puts the patches of all images side by side, as MiniCPM-V's does, and gives each text one row of marks."""

    image_token = "<image>"  # noqa: S105 - of a text

    tokenizer = SimpleNamespace()

    def __call__(self, text: list[str], images: list[list[Any]], **_: Any) -> dict[str, Tensor]:
        num_images = len(images[0])
        return {
            "input_ids": torch.full((1, num_images), IMAGE),
            "attention_mask": torch.ones(1, num_images),
            "pixel_values": torch.ones(1, 3, 2, 8 * num_images),
            "target_sizes": torch.tensor([[1, 4]] * num_images),
            "token_type_ids": torch.ones(1, num_images),
        }


def test_images_side_by_side_are_a_strip() -> None:
    encoded = ImageProcessing(Processor(), IMAGE).encode("<image>", ["an image"])

    assert encoded.layouts == {
        "pixel_values": "strip", "target_sizes": "batch", "token_type_ids": "token",
    }  # fmt: skip
    assert encoded.tensors["pixel_values"].shape == (1, 3, 2, 8)
    assert encoded.tensors["token_type_ids"].shape == (1,)
