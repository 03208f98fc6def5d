"""Every architecture of the installed transformers, found in its own registry, and its tiny configuration."""

import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# More parameters take more than a second for each check.
MOST_PARAMETERS = 20_000_000

_LAYERS = re.compile(r"(num|n)_?(hidden_)?(layers?|blocks)|.*_layers|n_layer|depth")
_KV_HEADS = re.compile(r".*(key_value|kv)_heads|multi_query_group_num|num_kv_heads")
# Largest value of a whole number in a configuration, by its name: the first pattern decides.
_SIZES = (
    (r"vocab_size(_per_layer_input)?", 384),
    (r"num_kv_shared_layers", 0),
    (r"num_feat_extract_layers", 99),  # those of the convolutions, whose settings are lists
    (_LAYERS.pattern, 2),
    (_KV_HEADS.pattern, 2),
    (r".*(attention_)?heads|n_head", 4),
    (r".*head_(dim|size)|d_kv|attention_key_size|rotary_dim", 16),
    (r"(attn|attention|full_attention|expert).*_(period|interval)", 2),
    (r"(attn|attention|expert)_layer_offset", 1),
    (r".*lora_rank", 16),
    (r".*(intermediate|ffn|feed_?forward|mlp|inner)_?(size|dim|hidden_size)|d_ff|n_inner", 128),
    (r".*experts_per_tok|moe_k|.*top_?k(_experts)?", 2),
    (r"(num|n)_.*experts|moe_num_experts", 4),
    (r"n_group|topk_group", 1),
    (r".*(hidden|embed|embedding|model|projection|width|output)_?(size|dim|embd)?|d_model|n_embd|dim", 64),
    (r"image_size", 32),
    (r"patch_size", 8),
    (r"mm_tokens_per_image", 4),
    (r".*(codebook|bins)_size", 64),
)  # fmt: skip
_TOKENS = re.compile(r".*token_(id|index)")
_MEDIA_TOKENS = re.compile(r"(image|video|audio)_token_(id|index)")
# With the usual range of 0.02 a narrow model hardly depends on its tokens.
# The last layers of a tower are those of a tower of two layers.
_REPLACED = {
    "initializer_range": 0.1,
    "decoder_start_token_id": 0,
    "vision_feature_layer": -1,
    "vision_feature_layers": [-2, -1],
    "cross_attention_layers": [1],
    "intermediate_layers_indices": [0],
    "vision_output_dim": 128,  # of the last layer and one other
    "attention_types": [[["global", "local"], 1]],
    "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]],
}
# Settings that the files of a model state and its class does not.
_ABSENT = {"vocab_size": 384, "head_dim": 16, "num_experts_per_tok": 2, "num_key_value_heads": 2}
_FIRST_TOKENS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model class of transformers."""

    model_type: str
    class_name: str

    def __str__(self) -> str:
        """Return the name for tables."""
        return f"{self.model_type}: {self.class_name}"


def list_architectures() -> list[Architecture]:
    """Return every model class that an auto class of transformers loads, in the registry's order."""
    from transformers.models.auto import modeling_auto

    found: dict[Architecture, None] = {}
    for name, mapping in vars(modeling_auto).items():
        if not re.fullmatch(r"MODEL_.*MAPPING_NAMES", name):
            continue
        for model_type, classes in mapping.items():
            for one in [classes] if isinstance(classes, str) else classes:
                found[Architecture(model_type, one)] = None
    return list(found)


def build_tiny(architecture: Architecture) -> nn.Module:
    """Build a tiny model with random weights.

    Raises: ValueError if no reduced configuration is accepted, or if the smallest one is too large.
    """
    import transformers

    model_class = getattr(transformers, architecture.class_name, None)
    if model_class is None:
        raise ValueError("transformers lacks a dependency of this class")
    config_class = model_class.config_class or type(
        transformers.AutoConfig.for_model(architecture.model_type)
    )
    problems = []
    built: nn.Module | None = None
    for settings in _reductions(config_class):
        try:
            config = config_class(**settings)
            if getattr(config, "is_encoder_decoder", False) and not hasattr(
                config, "decoder_start_token_id"
            ):
                config.decoder_start_token_id = 0  # as the files of T5 have
            with torch.device("meta"):
                outline = model_class(config)
        except Exception as error:  # noqa: BLE001 - each class refuses in its own way
            problems.append(f"{type(error).__name__}: {''.join(str(error).splitlines()[:1])}")
            continue
        num_parameters = sum(one.numel() for one in outline.parameters())
        if num_parameters > MOST_PARAMETERS:
            problems.append(f"{num_parameters / 1e6:.0f} million parameters")
            continue
        model: nn.Module = model_class(config).eval()
        _randomize(model)
        built = built or model
        if _reads_inputs(model):
            return model
    if built is not None:
        return built
    raise ValueError(problems[0])


@torch.no_grad()
def _reads_inputs(model: Any) -> bool:
    """Return True if the model accepts an image, or a text and a further token: settings may exclude each other."""
    parameters = inspect.signature(model.forward).parameters
    ids = torch.arange(3, 11)[None]
    inputs = {name: ids for name in ("input_ids", "decoder_input_ids") if name in parameters}
    if not inputs:
        size = getattr(model.config, "image_size", None) or 64
        sides = size if isinstance(size, list | tuple) else (size, size)
        inputs = {"pixel_values": torch.zeros(1, getattr(model.config, "num_channels", 3), *sides)}
    try:
        cache = getattr(model(**inputs), "past_key_values", None)
        if cache is not None and "past_key_values" in parameters:
            model(**inputs, past_key_values=cache)
    except Exception:  # noqa: BLE001 - each class refuses in its own way
        return False
    return True


def _reductions(config_class: type[Any]) -> Iterator[dict[str, Any]]:
    """Yield settings that make a configuration small, with fewer changes from one to the next."""
    reduced = reduce_settings(config_class)
    yield reduced
    yield {**reduced, "pad_token_id": 0}  # some have none, and need it
    # Two layers may lack a kind of layer that the code expects.
    yield _with_numbers(reduced, _LAYERS, 4)
    # A cache needs a layer of attention.
    first, *_ = getattr(config_class(), "layer_types", None) or ["full_attention"]
    yield {**reduced, "layer_types": [first, "full_attention"]}
    yield {**reduced, "attn_layer_indices": [1]}
    yield _with_numbers(reduced, _KV_HEADS, 4)  # latent attention has as many as queries
    yield {**reduced, "num_heads": 8}  # of a state that is twice as wide
    yield {name: one for name, one in reduced.items() if not name.endswith(("head_dim", "heads"))}
    kept = r"vocab_size|.*layers|n_layer|.*_token_id|.*_config"
    yield {name: one for name, one in reduced.items() if re.fullmatch(kept, name)}
    yield {}


def _with_numbers(settings: dict[str, Any], names: re.Pattern[str], number: int) -> dict[str, Any]:
    """Return settings with `number` for the whole numbers of these names, in each part."""
    return {
        name: _with_numbers(one, names, number)
        if isinstance(one, dict)
        else number
        if names.fullmatch(name) and type(one) is int
        else one
        for name, one in settings.items()
    }


def reduce_settings(config_class: type[Any]) -> dict[str, Any]:
    """Return the settings of a configuration class whose defaults are large, made small."""
    config = config_class()
    settings: dict[str, Any] = {}
    num_tokens = 3
    for name, value in config.to_dict().items():
        part = vars(config).get(name)
        if hasattr(part, "to_dict"):
            settings[name] = {"model_type": part.model_type, **reduce_settings(type(part))}
        elif (_TOKENS.fullmatch(name) and type(value) is int) or (
            _MEDIA_TOKENS.fullmatch(name) and value is None
        ):
            settings[name] = _FIRST_TOKENS.get(name, num_tokens)
            num_tokens += name not in _FIRST_TOKENS
        else:
            if name == "rope_parameters" and _reads_sections(config_class):
                value = {**value, "mrope_section": []}  # noqa: PLW2901 - the model has a default
            reduced = _reduce_value(name, value)
            if reduced is not None:
                settings[name] = reduced
    return settings


def _reads_sections(config_class: type[Any]) -> bool:
    """Return True if the code of a model divides its heads into sections for the axes of an image."""
    name = config_class.__module__.replace(".configuration_", ".modeling_")
    try:
        return "mrope_section" in inspect.getsource(importlib.import_module(name))
    except (ImportError, OSError):
        return False


def _reduce_value(name: str, value: object) -> object:
    """Return a smaller value of a setting; None to keep it."""
    if name in _REPLACED:
        return _REPLACED[name]
    if isinstance(value, dict) and "mrope_section" in value:
        return {**value, "mrope_section": [2, 3, 3]}  # half of a head
    if value is None:
        return _ABSENT.get(name)
    if type(value) is int:
        limit = next((size for form, size in _SIZES if re.fullmatch(form, name)), value)
        return limit if value > limit else None
    if isinstance(value, list | tuple) and value and all(type(one) is int for one in value):
        return _reduce_stages(name, value)
    return None


def _reduce_stages(name: str, values: Sequence[int]) -> list[int] | None:
    """Return smaller values of the stages of a tower; None to keep them."""
    if re.fullmatch(r"(num_)?(depths|hidden_layers|layers|blocks)", name):
        return [1] * len(values)
    if re.fullmatch(r"(num_)?(attention_)?heads", name):
        return [2 - one % 2 for one in values]
    if re.fullmatch(r".*(sizes|dims?|channels|dim)", name) and max(values) > 8:
        return [max(8, one // 8) if one > 4 else one for one in values]  # images have 3 channels
    return None


def _randomize(model: nn.Module) -> None:
    """Change norms and biases, which are one and zero in a new model, by a little noise, and fill zeros."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 and parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.02 * noise.to(parameter.dtype))
            elif parameter.is_floating_point() and not parameter.any():  # a router, for example
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.1 * noise)
