"""Tiny models with a part that text does not reach."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from assay.models.transformers_calls import quiet_transformers

_TOKENS = {"vocab_size": 384, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TEXT: dict[str, Any] = _TOKENS | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
}
_IMAGES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_AUDIO: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "num_mel_bins": 16,
    "max_source_positions": 32,
}
_QWEN_IMAGES = {"depth": 2, "num_heads": 2, "patch_size": 4}
_QWEN_TOKENS = {"image_token_id": 300, "video_token_id": 301, "vision_start_token_id": 302}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


@dataclass(frozen=True)
class UnreachedModel:
    """A model and what of it text does not reach.

    parts: the topmost modules; globs: what allows them.
    change: made to the weights before the model is saved.
    """

    architecture: str
    config: Callable[[], Any]
    parts: tuple[str, ...]
    globs: tuple[str, ...]
    change: Callable[[nn.Module], None] | None = None

    def save(self, folder: Path) -> Path:
        """Make the model's folder."""
        with torch.random.fork_rng(devices=[]), quiet_transformers():
            torch.manual_seed(0)
            model = getattr(transformers, self.architecture)(self.config())
            if self.change is not None:
                with torch.no_grad():
                    self.change(model)
            model.save_pretrained(folder)
        return folder


def _config(model_type: str, **settings: Any) -> Callable[[], Any]:
    return lambda: AutoConfig.for_model(model_type, **settings)


def _exclude_an_expert(model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer[2] = -1e3


UNREACHED: Mapping[str, UnreachedModel] = {
    "qwen2_vl": UnreachedModel(
        "Qwen2VLForConditionalGeneration",
        _config(
            "qwen2_vl",
            text_config=_TEXT | {"rope_parameters": _SECTIONS},
            vision_config=_QWEN_IMAGES | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
            tie_word_embeddings=False,
            **_QWEN_TOKENS,
        ),
        ("model.visual",),
        ("model.visual",),
    ),
    "qwen2_5_vl": UnreachedModel(
        "Qwen2_5_VLForConditionalGeneration",
        _config(
            "qwen2_5_vl",
            text_config=_TEXT | {"rope_parameters": _SECTIONS},
            vision_config=_QWEN_IMAGES
            | {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64},
            tie_word_embeddings=False,
            **_QWEN_TOKENS,
        ),
        ("model.visual",),
        ("*.visual.*",),
    ),
    "llava": UnreachedModel(
        "LlavaForConditionalGeneration",
        _config(
            "llava",
            text_config=_TEXT | {"model_type": "llama"},
            vision_config=_IMAGES | {"model_type": "clip_vision_model", "projection_dim": 32},
            image_token_index=300,
        ),
        ("model.multi_modal_projector", "model.vision_tower"),
        ("model.multi_modal_projector", "model.vision_tower"),
    ),
    "gemma3": UnreachedModel(
        "Gemma3ForConditionalGeneration",
        _config(
            "gemma3",
            text_config=_TEXT | {"head_dim": 16, "layer_types": ["full_attention"] * 2},
            vision_config=_IMAGES | {"model_type": "siglip_vision_model"},
            mm_tokens_per_image=4,
            image_token_id=300,
            boi_token_id=301,
            eoi_token_id=302,
        ),
        ("model.multi_modal_projector", "model.vision_tower"),
        ("model.multi_modal_projector", "model.vision_tower"),
    ),
    "idefics3": UnreachedModel(
        "Idefics3ForConditionalGeneration",
        _config(
            "idefics3",
            text_config=_TEXT | {"model_type": "llama"},
            vision_config=_IMAGES,
            image_token_id=300,
            pad_token_id=0,
            scale_factor=2,
        ),
        ("model.connector", "model.vision_model"),
        ("model.connector", "model.vision_model"),
    ),
    "mllama": UnreachedModel(
        "MllamaForConditionalGeneration",
        _config(
            "mllama",
            text_config=_TEXT | {"num_hidden_layers": 3, "cross_attention_layers": [1]},
            vision_config={
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_global_layers": 1,
                "attention_heads": 2,
                "image_size": 16,
                "patch_size": 4,
                "vision_output_dim": 64,
                "intermediate_layers_indices": [0],
            },
            image_token_index=300,
        ),
        (
            "model.language_model.layers.1",
            "model.multi_modal_projector",
            "model.vision_model",
        ),
        ("model.language_model.layers.1", "model.multi_modal_projector", "model.vision_model"),
    ),
    "qwen2_audio": UnreachedModel(
        "Qwen2AudioForConditionalGeneration",
        _config(
            "qwen2_audio",
            text_config=_TEXT | {"model_type": "qwen2"},
            audio_config=_AUDIO | {"model_type": "qwen2_audio_encoder"},
            audio_token_index=300,
        ),
        ("model.audio_tower", "model.multi_modal_projector"),
        ("model.audio_tower", "model.multi_modal_projector"),
    ),
    "voxtral": UnreachedModel(
        "VoxtralForConditionalGeneration",
        _config(
            "voxtral",
            text_config=_TEXT | {"model_type": "llama", "head_dim": 16},
            audio_config={
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_mel_bins": 16,
                "max_source_positions": 32,
            },
            audio_token_id=300,
            hidden_size=64,
        ),
        ("model.audio_tower", "model.multi_modal_projector"),
        ("model.audio_tower", "model.multi_modal_projector"),
    ),
    "git": UnreachedModel(
        "GitForCausalLM",
        _config("git", **_TEXT, vision_config=_IMAGES),
        ("git.image_encoder", "git.visual_projection"),
        ("git.image_encoder", "git.visual_projection"),
    ),
    "gpt2 with cross-attention": UnreachedModel(
        "GPT2LMHeadModel",
        _config(
            "gpt2",
            **_TOKENS,
            n_embd=64,
            n_layer=2,
            n_head=4,
            n_positions=256,
            add_cross_attention=True,
        ),
        (
            "transformer.h.0.crossattention",
            "transformer.h.0.ln_cross_attn",
            "transformer.h.1.crossattention",
            "transformer.h.1.ln_cross_attn",
        ),
        ("*.crossattention", "*.ln_cross_attn"),
    ),
    "deepseek_v3 with an expert that is never chosen": UnreachedModel(
        "DeepseekV3ForCausalLM",
        _config(
            "deepseek_v3",
            **_TEXT
            | {
                "num_key_value_heads": 4,
                "kv_lora_rank": 32,
                "q_lora_rank": 24,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 16,
                "v_head_dim": 16,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "n_routed_experts": 4,
                "n_shared_experts": 1,
                "first_k_dense_replace": 1,
                "n_group": 1,
                "topk_group": 1,
            },
        ),
        ("model.layers.1.mlp.experts.2",),
        ("model.layers.*.mlp.experts.2",),
        _exclude_an_expert,
    ),
}

_MODELING = '''
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


class HeadsConfig(LlamaConfig):
    model_type = "llama_heads"


class LlamaWithHeads(LlamaForCausalLM):
    """With heads for rewards and for the token after the next, for training, and an unused scale."""

    config_class = HeadsConfig

    def __init__(self, config):
        super().__init__(config)
        self.value_head = nn.Linear(config.hidden_size, 1)
        self.mtp = nn.ModuleList([LlamaDecoderLayer(config, 0)])
        self.logit_scale = nn.Parameter(torch.ones(1))
        self.post_init()
'''


def save_model_with_heads(folder: Path) -> Path:
    """A llama whose code, beside its weights, adds heads that generation does not use."""
    settings = {**_TEXT, "tie_word_embeddings": False}
    return save_own_code(folder, _MODELING, "HeadsConfig", "LlamaWithHeads", settings)


def save_own_code(
    folder: Path, code: str, config_class: str, model_class: str, settings: Mapping[str, Any]
) -> Path:
    """Save a model of classes in `code`, with the code beside its weights."""
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(0)
        scope: dict[str, Any] = {}
        exec(code, scope)  # noqa: S102 - of a test
        scope[model_class](scope[config_class](**settings)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [model_class]
    config["auto_map"] = {
        "AutoConfig": f"own_code.{config_class}",
        "AutoModelForCausalLM": f"own_code.{model_class}",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own_code.py").write_text(code)
    return folder


def save_llama(folder: Path) -> Path:
    """A plain llama."""
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**_TEXT)).save_pretrained(folder)
    return folder
