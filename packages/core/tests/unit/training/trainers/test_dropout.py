from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from assay.errors import UsageError
from assay.training.trainers.dropout import require_no_dropout

SMALL: dict[str, Any] = {
    "vocab_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "hidden_size": 8,
}


def test_only_dropout_that_is_drawn_is_refused() -> None:
    none: dict[str, Any] = {"attn_pdrop": 0.0, "embd_pdrop": 0.0}

    require_no_dropout(LlamaForCausalLM(LlamaConfig(**SMALL)), "train without")
    # Of the head of a classifier, which a causal model has not.
    require_no_dropout(GPT2LMHeadModel(GPT2Config(**SMALL, **none, resid_pdrop=0.0)), "why")
    with pytest.raises(UsageError, match=r"^resid_pdrop 0\.2: train without$"):
        require_no_dropout(
            GPT2LMHeadModel(GPT2Config(**SMALL, **none, resid_pdrop=0.2)), "train without"
        )
    with pytest.raises(UsageError, match=r"^attention_dropout 0\.1: train without$"):
        require_no_dropout(
            LlamaForCausalLM(LlamaConfig(**SMALL, attention_dropout=0.1)), "train without"
        )
