"""The tokenizer of models that have none of their own and read bytes, as lm-eval needs one."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from assay.models.micro.recipes import BOS_ID

_BOS, _PAD = "<bos>", "<pad>"


def byte_tokenizer(pad_id: int, *, starts_with_bos: bool) -> PreTrainedTokenizerFast:
    """Ids are the bytes of UTF-8, after a begin token if asked; as `assay.models` encodes text."""
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    vocabulary |= {_BOS: BOS_ID} | ({_PAD: pad_id} if pad_id not in (BOS_ID, *range(256)) else {})
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if starts_with_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{_BOS} $A", special_tokens=[(_BOS, BOS_ID)]
        )
    pad = _PAD if _PAD in vocabulary else _BOS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=_BOS, eos_token=_BOS, pad_token=pad
    )
