"""What parameters are for that no run reads."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from assay.devices.registry import open_device
from assay.generate.other_uses import find_other_uses
from assay.generate.passes import Side, whole_batches
from assay.inputs import Batch
from assay.models import LoadedModel, load_model


class Embeddings(nn.Module):
    """Its mask is for an argument, its noise for training, its far for long texts, and nothing reads its spare."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        vectors = (nn.Parameter(torch.ones(1)) for _ in range(4))
        self.mask, self.noise, self.far, self.spare = vectors

    def forward(self, ids: Tensor, masked: Tensor | None = None) -> Tensor:
        hidden: Tensor = self.inner(ids)
        if ids.shape[1] > 1000:
            hidden = hidden + self.far
        if masked is not None:
            hidden = torch.where(masked[..., None], self.mask, hidden)
        return hidden + self.noise if self.training else hidden


NAMES = [f"model.embed_tokens.{name}" for name in ("mask", "noise", "far", "spare")]


@pytest.fixture
def loaded() -> LoadedModel:
    loaded = load_model("micro:llama?trained=0", dtype="float32", attention="eager")
    model: Any = loaded.model.model
    model.embed_tokens = Embeddings(model.embed_tokens)
    loaded.model.eval()
    return loaded


def test_uses_in_training_and_for_an_argument_are_told(loaded: LoadedModel, batch: Batch) -> None:
    side = Side(loaded, open_device("cpu"))
    (work,) = whole_batches([batch])
    state = torch.get_rng_state()

    uses = find_other_uses(side, work, NAMES)

    assert uses == {NAMES[0]: "with masked", NAMES[1]: "in training"}
    assert not loaded.model.get_submodule("model.embed_tokens").training
    assert torch.equal(torch.get_rng_state(), state)


def test_an_argument_that_the_model_names_is_no_excuse(loaded: LoadedModel, batch: Batch) -> None:
    class Naming(type(loaded.model)):  # type: ignore[misc]
        def forward(self, *args: object, masked: Tensor | None = None, **kwargs: object) -> object:
            return super().forward(*args, **kwargs)

    loaded.model.__class__ = Naming
    side = Side(loaded, open_device("cpu"))

    assert NAMES[0] not in find_other_uses(side, whole_batches([batch])[0], NAMES)
