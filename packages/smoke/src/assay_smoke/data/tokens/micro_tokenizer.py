"""A generated tokenizer. Its ids are the bytes of UTF-8, then the special tokens of the micro models."""

from typing import Literal

from assay.models.micro.recipes import BOS_ID, EOS_ID, MASK_ID, PAD_ID
from assay_smoke.data.protocols import Tokenizer

BOS, EOS, PAD, MASK = "<|bos|>", "<|eos|>", "<|pad|>", "<|mask|>"
START = "<|im_start|>"

# `own`: a separate pad token; `eos`: as in `tokenizer.pad_token = tokenizer.eos_token`.
Padding = Literal["own", "eos"]
# Who writes BOS before a chat.
BosWriter = Literal["nobody", "template", "tokenizer", "both"]

# A turn ends with EOS. In the generation block, it has a label.
_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['role'] == 'assistant' -%}"
    "{% generation %}{{ message['content'] + '<|eos|>' }}{% endgeneration %}"
    "{%- else -%}"
    "{{ message['content'] + '<|eos|>' }}"
    "{%- endif -%}"
    "{{ '\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def micro_tokenizer(padding: Padding = "own", bos: BosWriter = "nobody") -> Tokenizer:
    """Make a byte-level tokenizer with a chat template that marks assistant tokens."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    # The order decides the ids, which follow those of the bytes.
    backend.add_special_tokens([BOS, EOS, PAD, MASK, START])
    if bos in ("tokenizer", "both"):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
        )
    tokenizer: Tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS if padding == "eos" else PAD,
        mask_token=MASK,
        extra_special_tokens=[START],
    )
    tokenizer.chat_template = (BOS if bos in ("template", "both") else "") + _TEMPLATE
    given = [tokenizer.convert_tokens_to_ids(token) for token in (BOS, EOS, PAD, MASK)]
    if given != [BOS_ID, EOS_ID, PAD_ID, MASK_ID]:
        raise AssertionError(f"ids of special tokens are {given}")
    return tokenizer
