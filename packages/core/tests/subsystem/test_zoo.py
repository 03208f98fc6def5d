"""The zoo: a tiny model of an architecture passes, and its planted fault is found."""

from typing import Any

import pytest
import torch

from packages.core.tests.zoo import architectures
from packages.core.tests.zoo.__main__ import check_architecture
from packages.core.tests.zoo.architectures import (
    Architecture,
    build_tiny,
    list_architectures,
    refuse_inputs,
)

pytestmark = pytest.mark.long


def test_a_clean_model_passes_and_its_fault_is_found() -> None:
    [qwen] = [one for one in list_architectures() if str(one).endswith("Qwen2ForCausalLM")]

    row = check_architecture(qwen, seed=0)

    assert (row.float32, row.bfloat16) == ("PASS", "PASS")
    assert row.planted
    assert row.found == row.planted


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        # Its class derives the width of the attention, and ties the weights of two layers.
        (Architecture("zamba", "ZambaModel"), {"hidden_size": 64, "attention_hidden_size": 128}),
        # Four patches of 64 become one.
        (Architecture("muse_glimmer", "MuseGlimmerModel"), {"out_hidden_size": 256}),
        (Architecture("zamba2", "Zamba2Model"), {"hybrid_layer_ids": [1, 3]}),
    ],
)
def test_tiny_model_keeps_the_relations_of_its_settings(
    architecture: Architecture, settings: dict[str, Any]
) -> None:
    torch.manual_seed(0)

    config: Any = build_tiny(architecture).config

    assert {name: getattr(config, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        # Its configuration says which number is not which other.
        (Architecture("glm5_next_text", "Glm5NextTextModel"), {"num_attention_heads": 2}),
        # Its configuration names the setting of a wrong type, and its code a key that it needs.
        (Architecture("cohere_compass_text", "CohereCompassTextModel"), {"num_hidden_layers": 2}),
        # Its class has no number of experts by default.
        (Architecture("dots1", "Dots1Model"), {"n_routed_experts": 4}),
        # Two layers of its pattern have no attention.
        (Architecture("recurrent_gemma", "RecurrentGemmaModel"), {"num_hidden_layers": 4}),
    ],
)
def test_tiny_model_has_what_its_code_asks_for(
    architecture: Architecture, settings: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model: Any = build_tiny(architecture)

    assert {name: getattr(model.config, name) for name in settings} == settings
    assert refuse_inputs(model) is None


def test_neck_gets_the_outputs_of_all_stages() -> None:
    torch.manual_seed(0)

    config: Any = build_tiny(Architecture("uvdoc", "UVDocModel")).config

    assert config.backbone_config.out_indices == [1, 2, 3, 4, 5, 6]


def test_search_ends_when_settings_are_refused_in_the_same_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = []

    def refuse(model: object) -> str:
        refused.append(model)
        return "the model takes pixel_values of a shape that is not known"

    monkeypatch.setattr(architectures, "refuse_inputs", refuse)

    build_tiny(Architecture("llama", "LlamaModel"))

    assert len(refused) == 6  # five of limited sizes, and one of divided sizes
