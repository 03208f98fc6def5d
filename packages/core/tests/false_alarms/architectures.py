"""Tiny untrained models of architectures whose parts the recipes do not have."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from assay.models.transformers_calls import quiet_transformers

_TOKENS = {"vocab_size": 384, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SHAPE: dict[str, Any] = _TOKENS | {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
}
_ROUTED: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GROUPED: dict[str, Any] = _ROUTED | {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}

# Routers with near ties: their choices depend on the seed.
ROUTED: Mapping[str, Mapping[str, Any]] = {
    "glm4_moe": _SHAPE | _GROUPED | {"head_dim": 16},
    "qwen3_moe": _SHAPE | _ROUTED | {"num_experts": 8, "head_dim": 16},
    "deepseek_v2": _SHAPE | _GROUPED | _LATENT | {"topk_method": "group_limited_greedy"},
    "olmoe": _SHAPE | {"num_experts": 8, "num_experts_per_tok": 2},
}
# Caches of another kind or name, or none; positions as biases.
OTHERS: Mapping[str, Mapping[str, Any]] = {
    "mamba2": _SHAPE
    | {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 16},
    "minimax": _SHAPE
    | {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "block_size": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "recurrent_gemma": _SHAPE
    | {
        "num_key_value_heads": 1,
        "lru_width": 64,
        "attention_window_size": 32,
        "head_dim": 16,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "mpt": _TOKENS
    | {"d_model": 64, "n_heads": 4, "n_layers": 3, "expansion_ratio": 2, "max_seq_len": 512},
}


# Caches of transformers 5.23 that take the length of their first layer, a linear one, for their own: in
# decode eager attention sees padding, and a fused one gives padded rows zeros. That is no false alarm.
WRONG_WITH_PADDING = frozenset({"minimax"})


def name_of(model_type: str, seed: int) -> str:
    """What a variant calls such a model."""
    return f"tiny {model_type} of seed {seed}"


def is_tiny(model: str) -> bool:
    """Whether `name_of` made this name."""
    return model.startswith("tiny ")


def make_tiny(model: str, folder: Path) -> Path:
    """The folder of the model of that name, newly made."""
    _, model_type, _, _, seed = model.split(" ")
    config = AutoConfig.for_model(model_type, **{**ROUTED, **OTHERS}[model_type])
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(int(seed))
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
