"""Every architecture of the installed transformers, found in its own registry, and its tiny configuration."""

import importlib
import inspect
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from assay.generate.generation_loop import generate
from assay.generate.run_plan import plan_inputs
from assay.generate.spec import InputOptions
from assay.models import load_model

# More parameters take more than a second for each check.
MOST_PARAMETERS = 36_000_000
# Searches for the shape of a model's inputs that end in the same words, numbers included: a search takes seconds, and
# is the same for other settings.
_MOST_REFUSALS = 5
_UNKNOWN_SHAPE = "of a shape that is not known"

_LAYERS = re.compile(r"(num|n)_?(hidden_)?(layers?|blocks)|.*_layers|n_layer|depth")
_KV_HEADS = re.compile(r".*(key_value|kv)_heads|multi_query_group_num|num_kv_heads")
# Largest value of a whole number in a configuration, by its name: the first pattern decides.
_SIZES = (
    (r"(.+_)?vocab(_size)?(_per_layer_input)?|n_words", 384),
    (r"upsample_groups", 64),
    (r"num_filters", 8),  # of a tower that doubles them at each stage
    (r"base_channels", 32),
    (r"upsample_initial_channel", 128),
    (r"num_groups", 8),
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
    (r".*experts_per_tok(en)?|moe_k|.*top_?k(_experts)?", 2),
    (r"(num|n)_.*experts|moe_num_experts", 4),
    (r"n_group|topk_group|num_expert_group", 1),
    (r".*(hidden|embed|embedding|model|projection|width|output)_?(size|dim|embd)?|d_model|n_embd|(emb_)?dim", 64),
    (r"image_size", 32),
    (r"output_channels", 64),  # of SAM's tower, for the decoder's width
    (r"image_embedding_size", 4),
    (r"num_pos_feats", 32),
    (r"patch_size", 8),
    (r"mm_tokens_per_image", 4),
    (r".*(codebook|bins)_size|num_embeddings", 64),
)  # fmt: skip
_WIDTHS = re.compile(
    r".*(hidden|embed|embedding|model|projection|intermediate|feature|ffn|neck|fusion)_?(sizes?|dims?)"
    r"(_per_stage)?|.*channels|.*channel_list|d_model|dim|width"
)
_TOKENS = re.compile(r".*(token|patch)_(id|index)")
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
    "deepstack_visual_indexes": [0, 1],
    "insert_layer_id": 0,
    "projector_patch_to_query_dict": {"16": 4},
    "vision_output_dim": 128,  # of the last layer and one other
    "attention_types": [[["global", "local"], 1]],
    "spatial_target_layers": [0, 0, 1, 1],
    "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]],
}
# Settings that the files of a model state and its class does not.
_ABSENT = {
    "vocab_size": 384,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 2,
    "prediction_length": 8,
    "default_language": "en_XX",
    "downsample_rate": "1/2",
    "deepstack_layer_map": [[-1, 0]],
    "vocabulary_map": {  # of Chameleon and of Emu3
        "<image>": 64,
        "<|extra_200|>": 65,
        **{f"IMGIMG{chr(65 + id_ // 8)}{chr(65 + id_ % 8)}Z": 128 + id_ for id_ in range(64)},
        **{f"<|visual token {id_:06d}|>": 192 + id_ for id_ in range(64)},
    },
}
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
    tried: list[dict[str, Any]] = []
    refusals: Counter[str] = Counter()
    declared = {*config_class().to_dict(), *config_class.attribute_map}
    for family in _reductions(config_class):
        for settings in family:
            settings = {name: one for name, one in settings.items() if name in declared}  # noqa: PLW2901
            if settings in tried:
                continue
            tried.append(settings)
            try:
                model = _build(model_class, config_class, settings)
            except Exception as error:  # noqa: BLE001 - each class refuses in its own way
                problems.append(f"{type(error).__name__}: {''.join(str(error).splitlines()[:1])}")
                continue
            built = built or model
            refusal = refuse_inputs(model)
            if refusal is None:
                return model
            refusals[refusal] += _UNKNOWN_SHAPE in refusal
            if refusals[refusal] >= _MOST_REFUSALS:
                break
    if built is not None:
        return built
    raise ValueError(problems[0])


def _build(model_class: Any, config_class: Any, settings: dict[str, Any]) -> nn.Module:
    """Build a model, with the settings that its code asks for. Raises: what it raises, or ValueError for its size."""
    tried: list[dict[str, Any]] = []
    outline: nn.Module | None = None
    while outline is None:
        tried.append(settings)
        try:
            config = config_class(**settings)
            if getattr(config, "is_encoder_decoder", False) and not hasattr(
                config, "decoder_start_token_id"
            ):
                config.decoder_start_token_id = 0  # as the files of T5 have
            with torch.device("meta"):
                outline = model_class(config)
        except Exception as error:
            settings = _mend(config_class, settings, str(error))
            if settings in tried:
                raise
    num_parameters = sum(one.numel() for one in outline.parameters())
    if num_parameters > MOST_PARAMETERS:
        raise ValueError(f"{num_parameters / 1e6:.0f} million parameters")
    model: nn.Module = model_class(outline.config).eval()
    _randomize(model)
    return model


_UNEQUAL = re.compile(
    r"`?([a-z_.]+)`? \(\d+\) must (?:equal|match|be the same as|be divisible by) .*?\((\d+)\)"
)
_NOT_OF_TYPE = re.compile(r"Validation error for field '(\w+)'")
_NO_ATTRIBUTE = re.compile(r"Config' object has no attribute '(\w+)'")


def _mend(config_class: Any, settings: dict[str, Any], message: str) -> dict[str, Any]:
    """Return settings as a message of a configuration or of a model asks for; the same if it asks for nothing."""
    if found := _UNEQUAL.search(message):
        part, _, name = found[1].rpartition(".")
        if part:
            return {**settings, part: {**settings.get(part, {}), name: int(found[2])}}
        return _with_numbers(settings, re.compile(name), int(found[2]))
    if found := _NOT_OF_TYPE.search(message):
        return _without(settings, found[1])
    if message == "'full_attention'":  # a key of settings for each kind of layer
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        kinds = getattr(config_class(), "layer_types", None) or ["full_attention"]
        return {**settings, "rope_parameters": dict.fromkeys(kinds, rope)}
    if found := _NO_ATTRIBUTE.search(message):  # that another class sets
        classes = vars(importlib.import_module(config_class.__module__)).values()
        stated = [vars(one) for one in classes if isinstance(one, type) and found[1] in vars(one)]
        added = {name: one[name] for one in stated for name in found.groups()}
        parts = {
            name: {**one, **added} for name, one in settings.items() if name.endswith("_config")
        }
        return {**settings, **parts, **added}
    return settings


def _without(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """Return settings without this name in each part."""
    return {
        key: _without(one, name) if isinstance(one, dict) else one
        for key, one in settings.items()
        if key != name
    }


def refuse_inputs(model: Any) -> str | None:
    """Return why assay finds no inputs that the model takes: settings may exclude each other."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            loaded = load_model(folder, dtype="float32", attention="eager")
            plan = plan_inputs(InputOptions(prompt_length="8:24", max_new_tokens=4), loaded)
            generate(loaded, plan.batches[0])
        except Exception as error:  # noqa: BLE001 - each class refuses in its own way
            return str(error).replace(folder, "")
    reads_media = loaded.media_token_id is None or any(batch.holds_media for batch in plan.batches)
    return None if reads_media else "no media"


def _reductions(config_class: type[Any]) -> Iterator[Iterator[dict[str, Any]]]:
    """Yield settings that make a configuration small: those of limited sizes, then those of divided ones."""
    reduced = reduce_settings(config_class())
    yield _limit_sizes(config_class, reduced)
    yield _divide_sizes(config_class, reduced)


def _limit_sizes(config_class: type[Any], reduced: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield reduced
    related = _keep_relations(config_class(), reduced)
    yield related
    yield {**reduced, "pad_token_id": 0}  # some have none, and need it
    yield _fill_absent(config_class(), reduced)
    # Two layers may lack a kind of layer that the code expects, or a second one with the same weights.
    for num_layers in (4, 6):
        yield _with_numbers(reduced, _LAYERS, num_layers)
    for num_outputs in (6, 4, 3):  # that a neck or a head takes from its backbone
        for num_layers in (2, 4):
            longer = _with_numbers(reduced, _LAYERS, num_layers)
            yield _with_outputs(config_class(), longer, num_outputs)
    first, *_ = getattr(config_class(), "layer_types", None) or ["full_attention"]
    yield {**reduced, "layer_types": [first, "full_attention"]}
    yield {**reduced, "attn_layer_indices": [1]}
    yield _with_numbers(reduced, _KV_HEADS, 4)  # latent attention has as many as queries
    yield {**reduced, "num_heads": 8}  # of a state that is twice as wide
    yield {name: one for name, one in reduced.items() if not name.endswith(("head_dim", "heads"))}
    yield _with_numbers(related, _LAYERS, 6)
    kinds = [*dict.fromkeys(getattr(config_class(), "layer_types", None) or [])]
    name_of_kinds = config_class.attribute_map.get("layer_types", "layer_types")
    yield {**_with_numbers(related, _LAYERS, 2 * len(kinds)), name_of_kinds: 2 * kinds}


def _divide_sizes(config_class: type[Any], reduced: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield settings with the ratios of the default ones."""
    for divisor in (8, 2):
        divided = _divide_widths(config_class().to_dict(), divisor)
        yield divided
        yield _with_numbers(divided, _LAYERS, 2)
    kept = r"vocab_size|.*layers|n_layer|.*_token_id|.*_config"
    yield {name: one for name, one in reduced.items() if re.fullmatch(kept, name)}
    yield {}


def _with_outputs(config: Any, settings: dict[str, Any], num_outputs: int) -> dict[str, Any]:
    """Return settings with which each backbone returns what its last stages do."""
    changed = dict(settings)
    for name, one in settings.items():
        part = vars(config).get(name)
        if hasattr(part, "to_dict"):
            changed[name] = _with_outputs(part, one, num_outputs)
    try:
        num_stages = len(type(config)(**settings).stage_names)
    except Exception:  # noqa: BLE001 - no backbone
        return changed
    if num_outputs >= num_stages:  # one of them is the stem
        return changed
    indices = [*range(num_stages - num_outputs, num_stages)]
    return {**changed, "out_features": None, "out_indices": indices}


def _fill_absent(config: Any, reduced: dict[str, Any]) -> dict[str, Any]:
    """Return settings with a number for each one without a default whose name has a limit."""
    filled = dict(reduced)
    for name, value in config.to_dict().items():
        part = vars(config).get(name)
        if hasattr(part, "to_dict"):
            filled[name] = _fill_absent(part, reduced[name])
        elif value is None and name not in reduced:
            field = getattr(config, "__dataclass_fields__", {}).get(name)
            limit = _limit_of(name)
            if limit is not None and "int" in str(getattr(field, "type", "")):
                filled[name] = limit
    return filled


def _keep_relations(config: Any, reduced: dict[str, Any]) -> dict[str, Any]:
    """Return reduced settings whose widths are the multiples of the hidden size that they were.

    Those that the class derives from others, and has as None by default, are left to it.
    """
    whole, fields = config.to_dict(), getattr(config, "__dataclass_fields__", {})
    unit, hidden = (
        one.get("hidden_size") or one.get("vision_config", {}).get("hidden_size")
        for one in (whole, reduced)
    )
    kept: dict[str, Any] = {}
    for name, value in reduced.items():
        part = vars(config).get(name)
        if hasattr(part, "to_dict"):
            kept[name] = _keep_relations(part, value)
        elif type(value) is int and hidden and _WIDTHS.fullmatch(name) and not whole[name] % unit:
            kept[name] = whole[name] // unit * hidden
        elif name not in fields or fields[name].default is not None or _TOKENS.fullmatch(name):
            kept[name] = value
    return kept


def _divide_widths(settings: dict[str, Any], divisor: int) -> dict[str, Any]:
    """Return settings whose widths have the ratios that they had."""

    def divide(name: object, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: divide(key, one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [divide(name, one) for one in value]
        if type(value) is not int or not isinstance(name, str):
            return value
        if name in ("image_size", "vocab_size"):
            return min(value, {"image_size": 224, "vocab_size": 384}[name])
        is_width = value >= 8 * divisor and value % divisor == 0 and _WIDTHS.fullmatch(name)
        return value // divisor if is_width else value

    return {name: divide(name, value) for name, value in settings.items()}


def _with_numbers(settings: dict[str, Any], names: re.Pattern[str], number: int) -> dict[str, Any]:
    """Return settings with `number` for the whole numbers of these names, in each part."""
    return {
        name: _with_numbers(one, names, number)
        if isinstance(one, dict)
        else number
        if type(one) is int and names.fullmatch(str(name))
        else one
        for name, one in settings.items()
    }


def reduce_settings(config: Any) -> dict[str, Any]:
    """Return the settings of a configuration that are large, made small."""
    config_class = type(config)
    settings: dict[str, Any] = {}
    num_tokens = 3
    for name, value in config.to_dict().items():
        part = vars(config).get(name)
        if hasattr(part, "to_dict"):
            small = reduce_settings(part)
            stated = _list_stated(part, small)
            settings[name] = {"model_type": part.model_type, **stated, **small}
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
    kinds = [*dict.fromkeys(getattr(config, "layer_types", None) or [])]
    name_of_kinds = config_class.attribute_map.get("layer_types", "layer_types")
    is_derived = isinstance(getattr(config_class, name_of_kinds, None), property)
    if len(kinds) > 1 and not is_derived and _num_kinds(config_class, settings) == 1:
        settings["layer_types"] = kinds[:2]  # a cache needs a layer of attention
    return settings


def _list_stated(part: Any, reduced: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a part has from the whole, without those that its class derives from others."""
    try:
        default, small = (type(part)(**given).to_dict() for given in ({}, reduced))
    except Exception:  # noqa: BLE001 - each class refuses in its own way
        return {}
    return {
        name: value
        for name, value in part.to_dict().items()
        if name in default and value != default[name] == small[name]
    }


def _num_kinds(config_class: type[Any], settings: dict[str, Any]) -> int:
    """Count the kinds of layers with these settings; 0 if they are refused."""
    try:
        return len({*config_class(**settings).layer_types})
    except Exception:  # noqa: BLE001 - each class refuses in its own way
        return 0


def _reads_sections(config_class: type[Any]) -> bool:
    """Return True if the code of a model divides its heads into sections for the axes of an image."""
    name = config_class.__module__.replace(".configuration_", ".modeling_")
    try:
        return "mrope_section" in inspect.getsource(importlib.import_module(name))
    except (ImportError, OSError):
        return False


def _reduce_value(name: str, value: object) -> object:
    """Return a smaller value of a setting; None to keep it."""
    if name in _REPLACED or value is None:
        replaced: Any = {**_ABSENT, **_REPLACED}.get(name)
        if isinstance(value, list | tuple) and not isinstance(replaced, list):
            return [replaced] * len(value)
        return replaced
    if isinstance(value, dict) and "mrope_section" in value:
        half = int(8 * value.get("partial_rotary_factor", 1))  # of a head
        side = 3 * half // 8
        section = [half - 2 * side, side, side]
        is_time_first = len({*value["mrope_section"][1:]}) == 1
        return {**value, "mrope_section": section if is_time_first else section[::-1]}
    if type(value) is int:
        limit = _limit_of(name)
        return limit if limit is not None and value > limit else None
    if isinstance(value, list | tuple) and value and all(type(one) is int for one in value):
        return _reduce_stages(name, value)
    return None


def _limit_of(name: str) -> int | None:
    return next((size for form, size in _SIZES if re.fullmatch(form, name)), None)


def _reduce_stages(name: str, values: Sequence[int]) -> list[int] | None:
    """Return smaller values of the stages of a tower, or the sides of an image; None to keep them."""
    if re.fullmatch(r"(image|img|crop)_size", name):
        return [min(one, 64) for one in values]
    name = name.removesuffix("_per_stage")
    if re.fullmatch(r"(num_)?(depths|hidden_layers|layers|blocks)", name):
        return [1] * len(values)
    if re.fullmatch(r"(num_)?(attention_)?heads", name):
        return [2 - one % 2 for one in values]
    if re.fullmatch(r".*(sizes|dims?|channels|channel_list)", name) and max(values) > 8:
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
