"""python -m packages.core.tests.foreign.making.capture_transformer_lens MODELS TRACES, with transformer-lens 4.3.0.

The bridge replaces the submodules of a transformers model. It loads its tokenizer from a folder again.
"""

from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import assay
from packages.core.tests.foreign.making.inputs import IDS, folders


def make_tokenizer(folder: str) -> Any:
    """Save a tokenizer of numbers, and load it."""
    words = Tokenizer(WordLevel({str(number): number for number in range(128)}, unk_token="0"))
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="1", eos_token="2", pad_token="0", unk_token="0"
    )
    made.save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


with TemporaryDirectory() as saved:
    tokenizer = make_tokenizer(saved)
    for name in ("llama", "qwen3"):
        for folder, trace in folders("transformer_lens", name):
            inner = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            ).eval()
            model = TransformerBridge.boot_transformers(
                str(folder), hf_model=inner, device="cpu", dtype=torch.float32, tokenizer=tokenizer
            )
            with torch.no_grad(), assay.capture(model, trace):
                model(IDS, return_type="logits")
