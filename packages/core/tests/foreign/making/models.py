"""Make the models of the captures, and five wrong weights of each, as transformers folders.

    python -m packages.core.tests.foreign.making.models MODELS    # MODELS/llama/clean, MODELS/llama/k_proj, ...

Weights are random, and large enough to make attention far from uniform. Run with transformers 5.23.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
)

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "dtype": "float32",
}  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, head_dim=16),
    # vLLM's attention on the CPU takes heads of 32 channels, not of 16.
    "llama-32": LlamaConfig(**SIZES, head_dim=32),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "mixtral": MixtralConfig(**SIZES, head_dim=32, num_local_experts=4, num_experts_per_tok=2),
}


def k_proj(layers: Any) -> None:
    """Make one channel of the keys 30 % too large. A norm of keys would undo a scale of all."""
    layers[0].self_attn.k_proj.weight[5] *= 1.3


def v_proj(layers: Any) -> None:
    """Change one weight of the values by 0.5."""
    layers[1].self_attn.v_proj.weight[5, 7] += 0.5


def o_proj(layers: Any) -> None:
    """Exchange two rows of the output projection."""
    weight = layers[1].self_attn.o_proj.weight
    weight[[3, 20]] = weight[[20, 3]]


def up_proj(layers: Any) -> None:
    """Make the up projection 2 % too large: of one expert, if there are some."""
    mlp = layers[1].mlp
    if hasattr(mlp, "up_proj"):
        mlp.up_proj.weight.mul_(1.02)
    else:
        mlp.experts.gate_up_proj[2, SIZES["intermediate_size"] :].mul_(1.02)


def down_proj(layers: Any) -> None:
    """Change one weight of the down projection by 0.5: of one expert, if there are some."""
    mlp = layers[1].mlp
    weight = mlp.down_proj.weight if hasattr(mlp, "down_proj") else mlp.experts.down_proj[1]
    weight[11, 4] += 0.5


FAULTS = (k_proj, v_proj, o_proj, up_proj, down_proj)


def build(config: PretrainedConfig) -> Any:
    """Return a model with the same random weights each time."""
    torch.manual_seed(20)
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(21)
    for path, weight in model.named_parameters():
        values = torch.randn(weight.shape, generator=generator)
        if "norm" in path:
            weight.data = 1 + 0.1 * values
        else:
            weight.data = values * (1.0 if "embed" in path else 1.4 / weight.shape[-1] ** 0.5)
    return model


@torch.no_grad()
def main(models: Path) -> None:
    """Save all models."""
    for name, config in CONFIGS.items():
        build(config).save_pretrained(models / name / "clean")
        for fault in FAULTS:
            model = build(config)
            fault(model.model.layers)
            model.save_pretrained(models / name / fault.__name__)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
