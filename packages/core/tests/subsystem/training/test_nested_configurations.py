"""Models whose parts have configurations of their own: a text in a model of images."""

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from assay.models.transformers_calls import quiet_transformers
from packages.core.tests.subsystem.training.conftest import RunTrain

pytestmark = pytest.mark.long

_TEXT: dict[str, Any] = {
    "vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": 2, "kv_lora_rank": 8, "q_lora_rank": 16,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1,
}  # fmt: skip


def llava() -> PreTrainedModel:
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8,
    }  # fmt: skip
    text = {"model_type": "llama", **_TEXT}
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=383)
    return LlavaForConditionalGeneration(config)


def qwen2_vl() -> PreTrainedModel:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {"depth": 2, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "patch_size": 4}
    text = {**_TEXT, "rope_parameters": rope}
    config = Qwen2VLConfig(vision_config=vision, text_config=text, image_token_id=380)
    return Qwen2VLForConditionalGeneration(config)


def deepseek_v3() -> PreTrainedModel:
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(**{**_TEXT, "num_key_value_heads": 4}, **_EXPERTS)
    )


@pytest.mark.parametrize(
    ("make", "arguments"),
    [(llava, ()), (qwen2_vl, ()), (deepseek_v3, ("--lora",))],
    ids=["llava", "qwen2_vl", "deepseek_v3 with adapters"],
)
def test_text_of_a_composed_model_trains_as_the_reference(
    train: RunTrain, tmp_path: Path, make: Any, arguments: tuple[str, ...]
) -> None:
    with quiet_transformers():
        make().save_pretrained(tmp_path / "model")

    run = train("--candidate", "cpu/float32", *arguments, model=str(tmp_path / "model"))

    levels = run.verdict["levels"]
    for name in ("load", "inputs", "loss", "activations", "gradients", "updates", "checkpoint"):
        assert levels[name]["verdict"] == "PASS", levels[name]
