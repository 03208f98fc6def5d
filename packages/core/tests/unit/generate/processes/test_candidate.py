"""What a candidate reports about its weights and its time."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from assay.generate.processes.candidate import _different_weights, _untied
from assay.models import weight_hashes


def section_of(model: nn.Module) -> Any:
    """The section of a golden with the present weights of `model`."""
    hashes = weight_hashes(model)
    return SimpleNamespace(weights=lambda: hashes)


def head_on(embedding: str) -> nn.ModuleDict:
    """A model whose head is tied to its embedding of this name."""
    model = nn.ModuleDict({embedding: nn.Embedding(7, 4), "lm_head": nn.Linear(4, 7, bias=False)})
    model["lm_head"].weight = model[embedding].weight
    return model


@pytest.mark.parametrize("embedding", ["embed_tokens", "wte"])
def test_head_that_lost_its_tie_is_listed(embedding: str) -> None:
    model = head_on(embedding)
    section = section_of(model)

    assert _untied(section, model) == []
    model["lm_head"].weight = nn.Linear(4, 7, bias=False).weight
    assert _untied(section, model) == ["lm_head.weight"]


def test_head_that_the_reference_does_not_tie_is_not_listed() -> None:
    model = nn.ModuleDict({"wte": nn.Embedding(7, 4), "lm_head": nn.Linear(4, 7, bias=False)})

    assert _untied(section_of(model), model) == []


def test_weights_of_a_wrapped_model_have_the_names_of_the_model() -> None:
    model = head_on("wte")

    assert _different_weights(section_of(model), nn.ModuleDict({"module": model})) == []
    changed = nn.ModuleDict({"module": head_on("wte")})
    assert "wte.weight" in _different_weights(section_of(model), changed)
