"""Tiny models of every architecture, with weights and batches that leave no gradient at zero."""

import warnings
import zlib
from typing import Any

import torch
from torch import Tensor, nn

ARCHITECTURES = ("llama", "granite", "qwen3", "mistral", "mixtral", "phi3")
VOCABULARY = 64
NUM_LAYERS = 2

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "granite": {
        "tie_word_embeddings": True,
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 3.0,
    },
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 4, "head_dim": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
    "phi3": {},
}


def build_model(architecture: str, **options: Any) -> nn.Module:
    """The same model on every rank: all parameters are drawn from one seed.

    architecture: a key of `_OPTIONS`; with `-untied` behind it, embedding and head are two parameters.
    """
    import transformers

    architecture, _, untied = architecture.partition("-")
    if untied:
        options = {"tie_word_embeddings": False} | options

    names = {"llama": "Llama", "granite": "Granite", "qwen3": "Qwen3", "mistral": "Mistral",
             "mixtral": "Mixtral", "phi3": "Phi3"}  # fmt: skip
    config_class = getattr(transformers, f"{names[architecture]}Config")
    model_class = getattr(transformers, f"{names[architecture]}ForCausalLM")
    implementations = {"attn_implementation": "eager", "experts_implementation": "eager"}
    config = config_class(**_SIZES | _OPTIONS[architecture] | implementations | options)
    model: nn.Module = model_class(config)
    draw_parameters(model)
    return model.train()


def draw_parameters(model: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            parameter.copy_(0.15 * noise if parameter.dim() > 1 else 1 + 0.1 * noise)


def add_lora(model: nn.Module, *adapters: str, **options: Any) -> Any:
    """Adapters of rank 4, neither half zero: their values depend on nothing but their names."""
    import peft

    config = peft.LoraConfig(
        r=4, lora_alpha=8, **{"target_modules": ["q_proj", "down_proj"]} | options
    )
    first, *more = adapters or ("default",)
    with warnings.catch_warnings():
        # peft 0.21 asks transformers 5.23 for attributes under their old names, and misses the
        # modules of a rank that it gives to fused experts itself.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        wrapped: Any = peft.get_peft_model(model, config, adapter_name=first)
        for name in more:
            wrapped.add_adapter(name, config)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            with torch.no_grad():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return wrapped.train()


def batch(seed: int) -> dict[str, Tensor]:
    """Two rows of 12 tokens, the second with 3 of padding, which has no label."""
    generator = torch.Generator().manual_seed(100 + seed)
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    ids[mask == 0] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }
