"""The model that each library quantizes. It is computed from integers, so every machine gets the same bits.

python -m packages.core.tests.foreign.original FOLDERS    # FOLDERS/original-bfloat16, FOLDERS/original-float32
"""

import sys
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

DTYPES = ("bfloat16", "float32")
# Rows of the MLP are not a multiple of 128, so the last block of fp8 is smaller.
SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
_HALF = 1 << 15


def _draw(random: Random, count: int) -> Tensor:
    """Draw uniform numbers in [-1, 1), float64."""
    data = torch.frombuffer(bytearray(random.randbytes(2 * count)), dtype=torch.int16)
    return data.double() / _HALF


def _fill(random: Random, weight: Tensor) -> Tensor:
    """Draw norms near 1, and matrices whose values have heavier tails than uniform ones."""
    if weight.dim() == 1:
        return 1 + 0.25 * _draw(random, len(weight))
    rows, columns = weight.shape
    values = (_draw(random, rows * columns) * _draw(random, rows * columns)).view(rows, columns)
    return values * (1 + _draw(random, rows).abs())[:, None] / 4


def save_original(folder: Path, dtype: str) -> None:
    """Save the model in one dtype."""
    random = Random(20)  # noqa: S311 - weights, no secrets
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            weight.copy_(_fill(random, weight))
    model.to(getattr(torch, dtype)).save_pretrained(folder)


if __name__ == "__main__":
    words = Tokenizer(WordLevel({str(one): one for one in range(SIZES["vocab_size"])}))
    special = dict(zip(("pad_token", "bos_token", "eos_token"), "012", strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    for name in DTYPES:
        folder = Path(sys.argv[1]) / f"original-{name}"
        save_original(folder, name)
        tokenizer.save_pretrained(folder)  # some libraries refuse a model without one
