"""Adapters to lm-eval's class for transformers models: model, byte tokenizer, progress."""

from collections.abc import Collection, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from assay.errors import UsageError
from assay.models import LoadedModel
from assay.models.folders import local_folder
from assay.models.loading.tokenizing import load_tokenizer
from assay.models.micro.recipes import BOS_ID
from assay.progress import subtask
from assay_bench.evaluating.requests import EvaluationRequest

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM

_BATCH_SIZE = 32
_BOS, _PAD = "<bos>", "<pad>"


def open_language_model(loaded: LoadedModel, options: EvaluationRequest) -> "HFLM":
    """Wrap the model as an lm-eval model."""
    from lm_eval.models import huggingface

    if loaded.tokenizer_kind == "none":
        raise UsageError(f"{options.model} has no tokenizer, which lm-eval needs")
    starts_with_bos = loaded.encode("")[:1] == [BOS_ID]
    if loaded.tokenizer_kind == "bytes":
        tokenizer = byte_tokenizer(loaded.pad_token_id, starts_with_bos=starts_with_bos)
    else:
        with local_folder(loaded.source, options.remote_code) as folder:
            tokenizer = load_tokenizer(folder, options.remote_code)
    huggingface.tqdm = BarAsTask
    return huggingface.HFLM(
        pretrained=loaded.model,
        tokenizer=tokenizer,
        batch_size=_BATCH_SIZE,
        max_length=loaded.max_positions,
        softmax_dtype="float32",
        add_bos_token=True if loaded.tokenizer_kind == "bytes" and starts_with_bos else None,
    )


def byte_tokenizer(pad_id: int, *, starts_with_bos: bool) -> PreTrainedTokenizerFast:
    """Make the tokenizer of models that read bytes. Its ids are those of `assay.models`."""
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


class BarAsTask:
    """A replacement for tqdm that shows each bar as a subtask of the open task."""

    def __init__(
        self,
        items: Collection[Any] = (),
        *,
        total: int | None = None,
        desc: str | None = None,
        **_: object,
    ) -> None:
        self._items, self._stack = items, ExitStack()
        task = subtask((desc or "prepares texts").lower(), total or len(items), "texts")
        self.update = self._stack.enter_context(task).advance
        self.close = self._stack.close

    def __iter__(self) -> Iterator[Any]:
        with self._stack:
            for item in self._items:
                yield item
                self.update()
