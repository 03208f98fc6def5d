"""Inputs follow from the signature of a model, from its configuration and those inside it, and from its errors."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from assay.errors import UsageError
from assay.inputs import Batch
from assay.media import find_input_limits
from assay.media.finding import model_inputs
from assay.models.config_files import Settings
from assay.models.load import _describe, _media_input, _media_token_id
from assay.models.sources import ModelSource

WIDTH, NUM_FEATURES, VOCAB_SIZE = 4, 6, 10


def load(model: Any, media_input: str = "") -> Any:
    return SimpleNamespace(
        model=model,
        config=model.config,
        vocab_size=VOCAB_SIZE,
        max_positions=None,
        pad_token_id=1,
        can_generate=False,
        decoder_start=(),
        eos_token_ids=(),
        reads_tokens="input_ids" in model.forward.__code__.co_varnames,
        media_input=media_input,
        media_token_id=_media_token_id(model),
    )


def run(loaded: Any, batch: Batch) -> object:
    return loaded.model(**model_inputs(batch, next(loaded.model.parameters())))


class Settled(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="own", image_size=8, **settings)
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def can_generate(self) -> bool:
        return False


class Part(nn.Module):
    def get_image_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(pixel_values), NUM_FEATURES, WIDTH)


class Marked(Settled):
    """A model whose images replace the tokens that a mask names."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(
        self,
        input_ids: torch.Tensor,
        pixel_values: Any = None,
        attention_mask: Any = None,
        image_embeds_position_mask: Any = None,
    ) -> torch.Tensor:
        if pixel_values is None:
            raise ValueError("You have to specify pixel_values")
        states = self.weight * torch.ones(*input_ids.shape, WIDTH)
        features = self.part.get_image_features(pixel_values)
        states[image_embeds_position_mask.bool()] = features.view(-1, WIDTH)
        return states


class Uncounted(Marked):
    """One of which no part tells the features of an image."""

    def __init__(self) -> None:
        super().__init__()
        tower, self.part = self.part, nn.Identity()  # type: ignore[assignment]
        object.__setattr__(self, "part", tower)  # no child
        del self._modules["part"]


class Merging(Uncounted):
    """One that also replaces a single token by all features of an image."""

    def forward(
        self,
        input_ids: torch.Tensor,
        pixel_values: Any = None,
        attention_mask: Any = None,
        image_embeds_position_mask: Any = None,
    ) -> torch.Tensor:
        marks = image_embeds_position_mask
        if pixel_values is not None and int(marks.sum()) == len(pixel_values):
            return self.weight * torch.ones(*input_ids.shape, WIDTH)
        return super().forward(input_ids, pixel_values, attention_mask, marks)


@pytest.mark.parametrize("model_class", [Marked, Uncounted, Merging])
def test_mask_marks_as_many_tokens_as_an_image_has_features(model_class: type[Any]) -> None:
    model = model_class()
    assert _media_input(model) == ""

    limits = find_input_limits(load(model), run=run)

    assert [len(image.ids) for image in limits.images] == [NUM_FEATURES]
    assert limits.marked_in == ("image_embeds_position_mask",)


class Forgiving(Marked):
    def forward(
        self,
        input_ids: torch.Tensor,
        pixel_values: Any = None,
        attention_mask: Any = None,
        image_embeds_position_mask: Any = None,
    ) -> torch.Tensor:
        if pixel_values is None:
            return self.weight * torch.ones(*input_ids.shape, WIDTH)
        return super().forward(input_ids, pixel_values, attention_mask, image_embeds_position_mask)


@pytest.mark.parametrize(("model_class", "needs_image"), [(Marked, True), (Forgiving, False)])
def test_model_that_refuses_a_text_alone_needs_an_image(
    model_class: type[Any], needs_image: bool
) -> None:
    limits = find_input_limits(load(model_class()), run=run)

    assert limits.images
    assert limits.needs_image == needs_image


def test_token_of_an_image_may_be_named_in_an_inner_configuration() -> None:
    vision = SimpleNamespace(model_type="vision", patch_size=7)
    inner = SimpleNamespace(model_type="inner", image_token_id=5, vision_config=vision)
    model = Settled(vlm_config=inner)
    model.forward = lambda input_ids, pixel_values=None: None

    assert _media_token_id(model) == 5
    assert _media_input(model) == ""
    assert Settings(model.config).read("patch_size") == 7


class Spoken(Settled):
    def forward(self, input_ids: torch.Tensor) -> None: ...


@pytest.mark.parametrize(
    ("settings", "vocab_size"),
    [({}, 256), ({"text": SimpleNamespace(model_type="text", vocab_size=78)}, 78)],
)
def test_vocabulary_may_be_that_of_an_inner_configuration(
    settings: Any, vocab_size: int, tmp_path: Path
) -> None:
    model: Any = Spoken(**settings)
    model.config.get_text_config = lambda: model.config

    loaded = _describe(model, ModelSource("spoken", "folder", tmp_path), tmp_path, "refuse")

    assert loaded.vocab_size == vocab_size


class Session:
    """No tensor."""


class OfSession(Settled):
    def forward(self, session: Session) -> None: ...


@pytest.mark.parametrize(
    ("model", "name", "message"),
    [
        (Settled(), "input", "Settled has no forward call"),
        (OfSession(), "session", "OfSession takes session, which is no tensor: Session"),
    ],
)
def test_model_without_tensors_is_refused_at_once(model: Any, name: str, message: str) -> None:
    loaded = load(model, name)
    with pytest.raises(UsageError, match=f"^{message}$"):
        find_input_limits(loaded, run=lambda *_: pytest.fail("the model was called"))
