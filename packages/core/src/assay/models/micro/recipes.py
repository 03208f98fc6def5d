"""Recipes of the small models that ship with the package, their text, and untrained ones; without importing torch.

The models have four layers and under half a million parameters, so that a check takes seconds. They are
trained, so that their distributions are peaked like those of real models. Their tokens are the bytes of
UTF-8. `assay models build` retrains one.
"""

import sysconfig
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.errors import UsageError, suggest
from assay.files import read_json_object
from assay.models.transformers_calls import quiet_transformers, save_pretrained

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

WEIGHTS = Path(__file__).parent / "weights"
PROVENANCE = "provenance.json"

BOS_ID, EOS_ID, PAD_ID, MASK_ID = 256, 257, 258, 259
VOCAB_SIZE = 260
MAX_POSITIONS = 2048


@dataclass(frozen=True, slots=True)
class MicroRecipe:
    """Hugging Face configuration and training settings of a micro model.

    Training takes at most 90 seconds on two cores.
    """

    name: str
    summary: str
    model_type: str
    architecture: str
    settings: Mapping[str, object]
    """Settings of the configuration that differ from the defaults of the model type."""
    steps: int = 1600
    rows: int = 4
    learning_rate: float = 4e-3
    masked: bool = False
    """Train the model to fill in masked bytes instead of predicting the next byte."""

    @property
    def folder(self) -> Path:
        """Return the folder of the trained weights in the package."""
        return WEIGHTS / self.name


# The initializer range is about 1/sqrt(hidden size). With the usual 0.02, made for large models, the loss
# after 480 steps of 2,048 tokens was 2.07 nats per byte instead of 1.68.
_SHAPE = {
    "hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_POSITIONS, "pad_token_id": PAD_ID, "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID, "initializer_range": 0.1,
}  # fmt: skip
_DECODER = _SHAPE | {"num_key_value_heads": 2, "intermediate_size": 256}
_ENCODER = _SHAPE | {
    "hidden_size": 80, "num_attention_heads": 5, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip

_ALL = (
    MicroRecipe(
        "llama", "grouped-query attention, RoPE, gated SiLU", "llama", "LlamaForCausalLM",
        _DECODER | {"tie_word_embeddings": False},
    ),
    MicroRecipe(
        "mistral", "llama with a sliding window of 32 in every layer", "mistral",
        "MistralForCausalLM", _DECODER | {"tie_word_embeddings": False, "sliding_window": 32},
        steps=1400,
    ),
    MicroRecipe(
        "gemma2", "soft caps, windows in every other layer, scaled and tied embedding, post norms",
        "gemma2", "Gemma2ForCausalLM",
        # Logits of a model of this size do not reach the published caps (50 and 30), so a missing
        # soft cap would change nothing.
        _DECODER | {
            "head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 32,
            "attn_logit_softcapping": 10.0, "final_logit_softcapping": 12.0,
        },
        steps=800,
    ),
    MicroRecipe(
        "mixtral", "4 experts, 2 for each token", "mixtral", "MixtralForCausalLM",
        _DECODER | {
            "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2,
            "sliding_window": None, "tie_word_embeddings": False,
        },
        steps=1300,
    ),
    MicroRecipe(
        "qwen3", "llama with a norm over each head of queries and keys", "qwen3",
        "Qwen3ForCausalLM", _DECODER | {"head_dim": 24, "tie_word_embeddings": False},
    ),
    MicroRecipe(
        "granite", "llama with multipliers of embedding, attention, residual and logits",
        "granite", "GraniteForCausalLM",
        # Those of granite-3 that do not depend on its size.
        _DECODER | {
            "embedding_multiplier": 12.0, "attention_multiplier": 0.0625,
            "residual_multiplier": 0.22, "logits_scaling": 8.0, "tie_word_embeddings": True,
        },
    ),
    MicroRecipe(
        "gpt-bigcode", "multi-query attention with fused weights, learned positions, GELU, biases",
        "gpt_bigcode", "GPTBigCodeForCausalLM",
        {
            "n_embd": 96, "n_layer": 4, "n_head": 4, "n_inner": 192, "n_positions": MAX_POSITIONS,
            "vocab_size": VOCAB_SIZE, "pad_token_id": PAD_ID, "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID, "initializer_range": 0.1, "resid_pdrop": 0.0,
            "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        },
    ),
    MicroRecipe(
        "bert", "encoder with learned positions and a tied masked-LM head; generates nothing",
        "bert", "BertForMaskedLM", _ENCODER | {"intermediate_size": 256},
        steps=1200, rows=8, learning_rate=1e-3, masked=True,
    ),
    MicroRecipe(
        "roberta", "bert whose positions begin after the padding id and skip paddings",
        "roberta", "RobertaForMaskedLM",
        _ENCODER | {
            "intermediate_size": 224, "max_position_embeddings": MAX_POSITIONS + PAD_ID + 1,
        },
        steps=1200, rows=8, learning_rate=1e-3, masked=True,
    ),
)  # fmt: skip
RECIPES: Mapping[str, MicroRecipe] = {recipe.name: recipe for recipe in _ALL}


def find_recipe(name: str) -> MicroRecipe:
    """Return the recipe called `name`. Raises: UsageError if it is unknown."""
    if name not in RECIPES:
        raise UsageError(suggest("recipe", name, RECIPES))
    return RECIPES[name]


def read_provenance(recipe: MicroRecipe) -> dict[str, Any] | None:
    """Return the record of the training of `recipe`; None if its weights are not installed."""
    path = recipe.folder / PROVENANCE
    return read_json_object(path) if path.is_file() else None


def new_config(recipe: MicroRecipe) -> "PretrainedConfig":
    """Make the Hugging Face configuration of `recipe`."""
    from transformers import AutoConfig

    config: PretrainedConfig = AutoConfig.for_model(recipe.model_type, **recipe.settings)
    config.architectures = [recipe.architecture]
    return config


def new_model(recipe: MicroRecipe, seed: int) -> "PreTrainedModel":
    """Make a randomly initialized float32 model without changing the global random state."""
    import torch
    import transformers

    model_class = getattr(transformers, recipe.architecture)
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class(new_config(recipe)).float()
    return model


def save_model(model: "PreTrainedModel", folder: Path) -> None:
    """Write `model` as a Hugging Face folder with bfloat16 weights. Its dtype in memory stays."""
    import torch

    state = {
        name: value.bfloat16() if value.is_floating_point() else value
        for name, value in model.state_dict().items()
    }
    model.config.dtype = torch.bfloat16
    save_pretrained(model, folder, state)


# Tests are repetitive. The others are not on every machine, or are data rather than text.
_EXCLUDED = {"test", "tests", "site-packages", "idlelib", "__pycache__", "lib2to3", "turtledemo"}
_HELD_OUT_SHARE = 20


def standard_library_text() -> tuple[bytes, bytes]:
    """Return the training text and the held-out text, which is one file in 20."""
    root = Path(sysconfig.get_path("stdlib"))
    training: list[bytes] = []
    held_out: list[bytes] = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not _EXCLUDED.intersection(name.parts):
            is_held_out = zlib.crc32(name.as_posix().encode()) % _HELD_OUT_SHARE == 0
            (held_out if is_held_out else training).append(path.read_bytes())
    return b"\n".join(training), b"\n".join(held_out)
