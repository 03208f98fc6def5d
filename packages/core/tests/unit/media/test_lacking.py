"""What a model lacks is read from its exceptions, within a small number of calls."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from assay.inputs import Batch, Media, ModelLimits
from assay.media.lacking import complete, with_additions

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


def test_added_tensor_has_a_shape_that_fits_several_rows() -> None:
    class Forecast(nn.Module):
        def forward(self, pixel_values: Any, freq: Any) -> None:
            """Compute.

            Args:
                freq (`torch.LongTensor` of shape `(batch_size,)`):
                    Kind of the series, in truth of shape `(batch_size, 1)`.
            """

    def run(_: Any, batch: Batch) -> None:
        if "freq" not in batch.inputs:
            raise ValueError("You have to specify freq")
        torch.ones(len(batch.rows), 5) * batch.inputs["freq"]

    loaded: Any = SimpleNamespace(**{**vars(LOADED), "model": Forecast()})
    loaded.model.config = SimpleNamespace()

    found = complete(loaded, LIMITS, run)

    assert [(one.name, one.shape) for one in found.media[1:]] == [("freq", (1, 1))]


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


def test_all_tensors_of_a_length_get_the_multiple_that_the_message_asks_for() -> None:
    def run(_: Any, batch: Batch) -> None:
        sound, mask = batch.media[0]
        if sound.shape[2] % 100:
            raise ValueError("expects a multiple of `n_window * 2` (100), but got 96.")
        assert mask.shape[1] == sound.shape[2]

    sound = Media("input_features", (1, 8, 96))
    mask = Media("input_features_mask", (1, 96), numbers=(1,))

    found = complete(LOADED, ModelLimits(0, has_tokens=False, media=(sound, mask)), run)

    assert [one.shape for one in found.media] == [(1, 8, 100), (1, 100)]


class Prompted(nn.Module):
    """A model that reads one parameter only with a prompt, and another only without."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        self.prompt = nn.Parameter(torch.ones(4))
        self.no_prompt = nn.Parameter(torch.ones(4))

    def forward(self, pixel_values: torch.Tensor, boxes: Any = None) -> dict[str, torch.Tensor]:
        """Compute.

        Args:
            boxes (`torch.Tensor` of shape `(batch_size, num_boxes, 4)`):
                Corners.
        """
        added = self.no_prompt if boxes is None else self.prompt * boxes
        return {"masks": pixel_values.mean() + added}


class Scoring(Prompted):
    def forward(self, pixel_values: torch.Tensor, boxes: Any = None) -> dict[str, torch.Tensor]:
        """Compute.

        Args:
            boxes (`torch.Tensor` of shape `(batch_size, num_boxes, 4)`):
                Corners.
        """
        scores = {} if boxes is None else {"scores": boxes.sum()[None]}
        return super().forward(pixel_values, boxes) | scores


def call(loaded: Any, batch: Batch) -> Any:
    return SimpleNamespace(outputs=loaded.model(**batch.inputs))


def load(model: nn.Module) -> Any:
    return SimpleNamespace(**{**vars(LOADED), "model": model})


def test_parts_that_exclude_each_other_run_in_different_batches() -> None:
    found = with_additions(load(Prompted()), LIMITS, call)

    assert found.media == (IMAGE,)
    assert [one.name for one in found.optional] == ["pixel_values", "boxes"]


def test_tensor_that_brings_an_output_comes_with_every_batch() -> None:
    found = with_additions(load(Scoring()), LIMITS, call)

    assert [one.name for one in found.media] == ["pixel_values", "boxes"]
    assert found.optional == ()
