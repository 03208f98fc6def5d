"""Tiny models with random weights that read images or sounds inside texts."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Florence2Config,
    Florence2ForConditionalGeneration,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    MllamaConfig,
    MllamaForConditionalGeneration,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PreTrainedModel,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    VoxtralConfig,
    VoxtralForConditionalGeneration,
)

from assay.models.transformers_calls import quiet_transformers

_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "bos_token_id": 301,
    "eos_token_id": 302,
    "pad_token_id": 303,
    "initializer_range": 0.1,
}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "initializer_range": 0.1,
}
_GRID_TOWER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 4,
    "depth": 2,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
    "initializer_range": 0.1,
}
_SOUND_TOWER: dict[str, Any] = {
    "num_mel_bins": 16,
    "max_source_positions": 24,
    "initializer_range": 0.1,
}
_MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_GRID_TOKENS: dict[str, Any] = {
    "image_token_id": 310,
    "video_token_id": 311,
    "vision_start_token_id": 312,
    "vision_end_token_id": 313,
}
_GEMMA: dict[str, Any] = {**_TEXT, "head_dim": 16}

MODELS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "llava": (
        LlavaForConditionalGeneration,
        lambda: LlavaConfig(
            vision_config={"model_type": "clip_vision_model", "projection_dim": 32, **_TOWER},
            text_config={"model_type": "llama", **_TEXT},
            image_token_index=310,
            vision_feature_layer=-1,
        ),
    ),
    "blip2": (
        Blip2ForConditionalGeneration,
        lambda: Blip2Config(
            vision_config=_TOWER,
            qformer_config={**_TEXT, "encoder_hidden_size": 32},
            text_config={"model_type": "llama", **_TEXT},
            num_query_tokens=4,
            image_token_index=310,
        ),
    ),
    "florence2": (
        Florence2ForConditionalGeneration,
        lambda: Florence2Config(
            vision_config={
                "depths": [1, 1, 1, 1],
                "embed_dim": [16, 32, 32, 64],
                "num_heads": [2, 2, 2, 4],
                "num_groups": [2, 2, 2, 4],
                "projection_dim": 64,
            },
            text_config={
                "model_type": "bart",
                "d_model": 64,
                "encoder_layers": 2,
                "decoder_layers": 2,
                "encoder_attention_heads": 4,
                "decoder_attention_heads": 4,
                "encoder_ffn_dim": 128,
                "decoder_ffn_dim": 128,
                "vocab_size": 320,
                "max_position_embeddings": 256,
            },
            image_token_id=310,
        ),
    ),
    "llava_next": (
        LlavaNextForConditionalGeneration,
        lambda: LlavaNextConfig(
            vision_config={"model_type": "clip_vision_model", "projection_dim": 32, **_TOWER},
            text_config={"model_type": "llama", **_TEXT},
            image_token_index=310,
            vision_feature_layer=-1,
            image_grid_pinpoints=[[32, 64], [64, 32]],
        ),
    ),
    "qwen2_audio": (
        Qwen2AudioForConditionalGeneration,
        lambda: Qwen2AudioConfig(
            audio_config={
                **_SOUND_TOWER,
                "d_model": 32,
                "encoder_layers": 2,
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 64,
            },
            text_config={"model_type": "qwen2", **_TEXT},
            audio_token_index=310,
        ),
    ),
    "voxtral": (
        VoxtralForConditionalGeneration,
        lambda: VoxtralConfig(
            audio_config={
                **_SOUND_TOWER,
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "intermediate_size": 128,
            },
            text_config={"model_type": "llama", **_TEXT},
            audio_token_id=310,
        ),
    ),
    "qwen2_vl": (
        Qwen2VLForConditionalGeneration,
        lambda: Qwen2VLConfig(
            vision_config={**_GRID_TOWER, "embed_dim": 32, "mlp_ratio": 2},
            text_config={**_TEXT, "rope_parameters": _MROPE},
            **_GRID_TOKENS,
        ),
    ),
    "qwen3_vl": (
        Qwen3VLForConditionalGeneration,
        lambda: Qwen3VLConfig(
            vision_config={
                **_GRID_TOWER,
                "hidden_size": 32,
                "out_hidden_size": 64,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
            text_config={
                **_TEXT,
                "head_dim": 16,
                "rope_parameters": {**_MROPE, "mrope_interleaved": True},
            },
            **_GRID_TOKENS,
        ),
    ),
    "idefics3": (
        Idefics3ForConditionalGeneration,
        lambda: Idefics3Config(
            vision_config=_TOWER,
            text_config={"model_type": "llama", **_TEXT},
            scale_factor=2,
            image_token_id=310,
        ),
    ),
    "mllama": (
        MllamaForConditionalGeneration,
        lambda: MllamaConfig(
            vision_config={
                **_TOWER,
                "attention_heads": 4,
                "num_global_layers": 1,
                "vision_output_dim": 64,
                "intermediate_layers_indices": [0],
                "max_num_tiles": 4,
                "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1], [2, 2]],
            },
            text_config={**_TEXT, "num_hidden_layers": 3, "cross_attention_layers": [1]},
            image_token_index=310,
        ),
    ),
    "paligemma": (
        PaliGemmaForConditionalGeneration,
        lambda: PaliGemmaConfig(
            vision_config={"model_type": "siglip_vision_model", "projection_dim": 64, **_TOWER},
            text_config={"model_type": "gemma", **_GEMMA},
            projection_dim=64,
            image_token_index=330,  # outside of the vocabulary
        ),
    ),
    "gemma3": (
        Gemma3ForConditionalGeneration,
        lambda: Gemma3Config(
            vision_config={"model_type": "siglip_vision_model", **_TOWER},
            text_config={"model_type": "gemma3_text", **_GEMMA, "sliding_window": 64},
            mm_tokens_per_image=4,
            image_token_index=310,
            boi_token_index=312,
            eoi_token_index=313,
        ),
    ),
}


def save_model(folder: Path, name: str, plants: str = "") -> Path:
    """Save the model called `name` in `folder`. plants: text of plants.py there."""
    kind, make_config = MODELS[name]
    torch.manual_seed(0)
    with quiet_transformers():
        model: Any = kind(make_config())
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                if path.endswith(("bias", "gate")):  # zero in a new model
                    parameter.normal_(std=0.3)
        model.save_pretrained(folder)
    (folder / "plants.py").write_text(plants)
    return folder


def save_processor(folder: Path) -> None:
    """Save a processor for the model "llava": a token for each byte, and an image token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import CLIPImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast

    symbols = [
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *(f"<{id_}>" for id_ in range(256, 307)),
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab={one: id_ for id_, one in enumerate(symbols)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",  # noqa: S106 - a token of text
        eos_token="</s>",  # noqa: S106 - as above
        pad_token="<pad>",  # noqa: S106 - as above
        extra_special_tokens={"image_token": "<image>"},  # 310
    )
    images = CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    LlavaProcessor(
        image_processor=images,
        tokenizer=fast,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
