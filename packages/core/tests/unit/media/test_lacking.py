"""What a model lacks is read from its exceptions, within a small number of calls."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from assay.inputs import Batch, Media, ModelLimits
from assay.media.lacking import complete

IMAGE = Media("pixel_values", (1, 3, 32, 32))
LIMITS = ModelLimits(0, has_tokens=False, media=(IMAGE,))


class Model(nn.Module):
    def forward(self, pixel_values: Any, boxes: Any = None) -> None:
        """Compute.

        Args:
            boxes (`torch.Tensor` of shape `(batch_size, num_boxes, 4)`):
                Corners.
        """


LOADED: Any = SimpleNamespace(
    model=Model(),
    vocab_size=0,
    pad_token_id=0,
    can_generate=False,
    decoder_start=(),
    reads_tokens=False,
)
LOADED.model.config = SimpleNamespace()


def test_named_argument_is_added() -> None:
    def run(_: Any, batch: Batch) -> None:
        if "boxes" not in {one.name for one in batch.media[0]}:
            raise ValueError("You have to specify boxes")

    found = complete(LOADED, LIMITS, run)

    assert [(one.name, one.shape) for one in found.media[1:]] == [("boxes", (1, 4, 4))]


def test_image_gets_the_size_that_the_message_asks_for() -> None:
    def run(_: Any, batch: Batch) -> None:
        if batch.media[0][0].shape[2:] != (24, 40):
            raise ValueError("Input image size (32*32) doesn't match model (24*40).")

    assert complete(LOADED, LIMITS, run).media[0].shape == (1, 3, 24, 40)


def test_size_that_never_fits_is_given_up() -> None:
    shapes = []

    def run(_: Any, batch: Batch) -> None:
        shapes.append(batch.media[0][0].shape)
        raise ValueError("The size of tensor a (4) must match the size of tensor b (16)")

    with pytest.raises(ValueError, match="size of tensor"):
        complete(LOADED, LIMITS, run)

    sides = [shape[-1] for shape in shapes]
    assert sorted(sides) == [2, 8, 32, 128, 512]


def test_text_of_a_classifier_ends_with_the_token_that_it_needs() -> None:
    def run(_: Any, batch: Batch) -> None:
        if batch.rows[0][-1] != 2:
            raise ValueError("Each example must contain at least one <eos> token.")

    loaded: Any = SimpleNamespace(**{**vars(LOADED), "vocab_size": 9, "reads_tokens": True})

    assert complete(loaded, ModelLimits(9, end_token_id=2), run).media == ()
