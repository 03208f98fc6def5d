"""Models that published bugs need and no recipe has: made from recipes, or small and random."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from assay.models import load_model, resolve_model
from assay.plugins import load_object
from packages.core.tests.faults.published.plants import weights

REMOTE_CODE = Path(__file__).parent / "remote_code" / "modeling_own.py"
WEIGHTS_FILE = "model.safetensors"

_SHAPE = {
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "vocab_size": 260,
    "max_position_embeddings": 2048,
    "pad_token_id": 258,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}


def make_model(name: str, folder: Path) -> str:
    """MODEL for a check: `name` itself of a recipe, else the folder that is made for it."""
    if name.startswith("micro:"):
        return name
    if not folder.exists():
        folder.mkdir(parents=True)
        MAKERS[name](folder)
    return str(folder)


def _with_settings(
    recipe: str,
    changed: Mapping[str, object],
    change: Callable[[dict[str, Tensor]], None] | None = None,
) -> Callable[[Path], None]:
    """A trained recipe with other settings, and other weights."""

    def make(folder: Path) -> None:
        found = resolve_model(f"micro:{recipe}").recipe
        assert found is not None
        shutil.copytree(found.folder, folder, dirs_exist_ok=True)
        _edit(folder, changed)
        if change is not None:
            tensors = load_file(folder / WEIGHTS_FILE)
            change(tensors)
            save_file(tensors, folder / WEIGHTS_FILE, {"format": "pt"})

    return make


def _random(
    model_type: str, settings: Mapping[str, Any], edited: Mapping[str, object] | None = None
) -> Callable[[Path], None]:
    """A random model; `edited` goes into config.json as it is, past the configuration's class."""

    def make(folder: Path) -> None:
        config = AutoConfig.for_model(model_type, **{**_SHAPE, **settings})
        kind = AutoModelForMaskedLM if model_type == "modernbert" else AutoModelForCausalLM
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            kind.from_config(config, dtype=torch.float32).save_pretrained(folder)  # type: ignore[no-untyped-call]
        _edit(folder, edited or {})

    return make


def _own_code(recipe: str, name: str) -> Callable[[Path], None]:
    """A trained recipe as a class of `remote_code`, whose file comes with it."""

    def make(folder: Path) -> None:
        trained = load_model(f"micro:{recipe}", dtype="float32").model
        own_class = load_object(f"{REMOTE_CODE}:{name}")
        model = own_class(trained.config).float()
        model.load_state_dict(trained.state_dict(), strict=False)
        model.save_pretrained(folder)
        shutil.copy(REMOTE_CODE, folder)
        code = {"AutoModelForCausalLM": f"{REMOTE_CODE.stem}.{name}"}
        _edit(folder, {"architectures": [name], "auto_map": code})

    return make


def _edit(folder: Path, changed: Mapping[str, object]) -> None:
    path = folder / "config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) | changed
    path.write_text(json.dumps(settings), encoding="utf-8")


def _set(name: str, weight: Callable[[], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: weight()})


def _enlarge_keys(tensors: dict[str, Tensor]) -> None:
    """Keys beyond what float8 holds; queries as much smaller, so that scores stay as they are."""
    for name, tensor in tensors.items():
        if ".k_proj." in name:
            tensor.mul_(1024)
        if ".q_proj." in name:
            tensor.div_(1024)


_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 128}  # fmt: skip

MAKERS: Mapping[str, Callable[[Path], None]] = {
    "llama, theta 500000": _with_settings(
        "llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    ),
    "llama, yarn": _with_settings("llama", {"rope_parameters": _YARN}),
    "llama, large keys": _with_settings("llama", {}, _enlarge_keys),
    "llama, merged adapter": _with_settings(
        "llama", {}, _set(weights.PROJECTION, lambda: weights.merged_weight(weights.MERGE_WEIGHT))
    ),
    "llama, 4 bits": _with_settings(
        "llama", {}, _set(weights.PROJECTION, lambda: weights.quantised_weight(None))
    ),
    "llama, 8 heads, 2 of keys": _random("llama", {"num_attention_heads": 8}),
    "llama, biases": _random("llama", {"attention_bias": True}),
    "llama, tied": _random("llama", {"tie_word_embeddings": True}),
    "llama, padded by a line end": _with_settings("llama", {"pad_token_id": ord("\n")}),
    "mixtral, 1 expert": _with_settings("mixtral", {"num_experts_per_tok": 1}),
    "olmoe, 1 expert": _random(
        "olmoe",
        {"num_experts": 4, "num_experts_per_tok": 1, "norm_topk_prob": False, "intermediate_size": 64},
    ),
    "qwen2, window off": _random(
        "qwen2", {}, {"sliding_window": 32, "use_sliding_window": False}
    ),
    "modernbert": _random(
        "modernbert", {"local_attention": 32, "global_attn_every_n_layers": 2, "cls_token_id": 256, "sep_token_id": 257}
    ),
    "gemma3": _random(
        "gemma3_text",
        {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 32,
         "layer_types": ["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"]},
        {"_sliding_window_pattern": 3},
    ),
    "granite, logits divided": _random("granite", {"logits_scaling": 0.6}),
    "own code: mixtral, balanced": _own_code("mixtral", "BalancedMixtral"),
    "own code: llama, embedding frozen": _own_code("llama", "HalfFrozenLlama"),
}  # fmt: skip
