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
from packages.core.tests.unit.generate import unread_parameters
from packages.core.tests.unit.generate.unread_parameters import Embeddings, Experts

CALLED = {"", "model", "model.embed_tokens", "model.embed_tokens.experts"}
NAMES = [
    f"model.embed_tokens.{name}" for name in ("mask", "scale", "noise", "far", "bare", "spare")
]


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

    uses = find_other_uses(side, work, NAMES, CALLED)

    mask, scale, noise, _, _, spare = NAMES
    assert uses == {
        mask: "with masked",
        scale: "with factor",
        noise: "in training",
        spare: "by no code",
    }
    assert not loaded.model.get_submodule("model.embed_tokens").training
    assert torch.equal(torch.get_rng_state(), state)


def test_an_argument_that_the_model_names_is_no_excuse(loaded: LoadedModel, batch: Batch) -> None:
    class Naming(type(loaded.model)):  # type: ignore[misc]
        def forward(self, *args: object, masked: Tensor | None = None, **kwargs: object) -> object:
            return super().forward(*args, **kwargs)

    loaded.model.__class__ = Naming
    side = Side(loaded, open_device("cpu"))

    assert NAMES[0] not in find_other_uses(side, whole_batches([batch])[0], NAMES, CALLED)


def test_a_module_for_labels_is_told_and_one_for_absent_embeddings_is_not(
    loaded: LoadedModel, batch: Batch
) -> None:
    class Learning(type(loaded.model)):  # type: ignore[misc]
        def forward(self, *args: object, labels: Tensor | None = None, **kwargs: object) -> object:
            output = super().forward(*args, **kwargs)
            if labels is not None:
                output["loss"] = self.objective(output.logits)
            return output

    loaded.model.__class__ = Learning
    loaded.model.objective = nn.Linear(2, 2, bias=False)
    side = Side(loaded, open_device("cpu"))
    names = ["objective.weight", "model.embed_tokens.inner.weight"]

    uses = find_other_uses(side, whole_batches([batch])[0], names, CALLED)

    assert uses.pop("objective.weight") == "with labels"
    assert not any(use.startswith("with") for use in uses.values())


def find_uses_in_experts(loaded: LoadedModel, batch: Batch, *names: str) -> dict[str, str]:
    experts: Any = loaded.model.get_submodule("model.embed_tokens")
    experts.__class__ = Experts
    experts.experts = nn.ModuleDict({"qwxz": nn.Linear(1, 1, bias=False)})
    experts.scale_3, experts.gate = (nn.Parameter(torch.ones(1)) for _ in range(2))
    side = Side(loaded, open_device("cpu"))
    unread = [f"model.embed_tokens.{name}" for name in names]
    return find_other_uses(side, whole_batches([batch])[0], unread, CALLED)


def test_a_part_whose_name_is_built_or_a_key_is_not_excused(
    loaded: LoadedModel, batch: Batch
) -> None:
    # SwitchTransformers (transformers 5.23.0) has its experts in a dictionary.
    assert find_uses_in_experts(loaded, batch, "scale_3", "experts.qwxz.weight") == {}


def read_gate(module: Any) -> Tensor:
    gate: Tensor = module.gate
    return gate


def test_a_part_that_a_function_of_another_file_reads_is_not_excused(
    loaded: LoadedModel, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_uses_in_experts(loaded, batch, "gate") != {}

    monkeypatch.setattr(unread_parameters, "read_gate", read_gate, raising=False)

    assert find_uses_in_experts(loaded, batch, "gate") == {}


def test_a_part_of_a_module_that_did_not_run_is_not_excused(
    loaded: LoadedModel, batch: Batch
) -> None:
    side = Side(loaded, open_device("cpu"))
    spare = NAMES[3:]

    assert (
        find_other_uses(side, whole_batches([batch])[0], spare, CALLED - {"model.embed_tokens"})
        == {}
    )
