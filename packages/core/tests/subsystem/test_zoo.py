"""The zoo: a tiny model of an architecture passes, and its planted fault is found."""

from typing import Any

import pytest
import torch

from packages.core.tests.zoo.__main__ import check_architecture
from packages.core.tests.zoo.architectures import Architecture, build_tiny, list_architectures

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
