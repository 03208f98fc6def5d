"""Run a batch through `model.generate`: free, with teacher forcing, or all tokens in one call.

Teacher forcing also uses the generation loop, so that its positions, masks and cache are tested.
"""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
)

from assay.errors import AssayError, UsageError, raised_in_words
from assay.generate.golden import LOGITS
from assay.hooks.row_positions import BatchPositions
from assay.inputs import Batch, ModelLimits, insert_media
from assay.media import find_input_limits, model_inputs, with_additions
from assay.models import LoadedModel
from assay.models.config_files import first_line
from assay.models.image_processing import ImageProcessing
from assay.progress import advance_task

GREEDY: dict[str, Any] = {"do_sample": False}


class OutputError(UsageError):
    """Output that cannot be compared with anything: the model raised, or returned another shape.

    raised: True if the model raised an exception.
    """

    def __init__(self, message: str, *, raised: bool = False) -> None:
        super().__init__(message)
        self.raised = raised


@contextmanager
def model_code() -> Iterator[None]:
    """Run code of a model inside the context. Raises: OutputError for its exceptions."""
    try:
        yield
    except (AssayError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise OutputError(f"the model raised {raised_in_words(error)}", raised=True) from error


@dataclass(frozen=True, slots=True)
class Generated:
    """The output for a batch."""

    tokens: Tensor
    """(B, N) generated ids; N is 0 for a model that does not generate."""
    outputs: Mapping[str, Tensor]
    """The model's outputs by name, on the CPU. `LOGITS` of a model that generates are (B, N, V), before any
    processor, in the generation loop's precision; the outputs of other models are as `name_outputs` says."""

    @property
    def logits(self) -> Tensor:
        """Return the logits over the vocabulary. Raises: KeyError without."""
        return self.outputs[LOGITS]


class _Force(LogitsProcessor):
    """A processor that allows only the given token at every step."""

    def __init__(self, tokens_BN: Tensor, first_length: int) -> None:
        self._tokens_BN = tokens_BN
        self._first_length = first_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = input_ids.shape[1] - self._first_length
        token_B1 = self._tokens_BN[:, step : step + 1].to(scores.device)
        return torch.full_like(scores, -torch.inf).scatter(1, token_B1, 0.0)


class _Count(LogitsProcessor):
    """A counter of the tokens read in each step, without effect on the run."""

    def __init__(self, batch: Batch) -> None:
        self._prompt_length, self._first_length = batch.length, _first_length(batch)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        num_rows, length = input_ids.shape
        is_first = length == self._first_length
        advance_task("tokens", num_rows * (self._prompt_length if is_first else 1))
        return scores


def _first_length(batch: Batch) -> int:
    """Return the length of the sequences that a generation extends: prompts, or a decoder's first ids."""
    return len(batch.decoder_start) or batch.length


def count_tokens(batches: Iterable[Batch]) -> int:
    """Return how many "tokens" one run of `batches` adds to the innermost task."""
    return sum(
        len(batch.rows) * (batch.length + max(0, batch.max_new_tokens - 1)) for batch in batches
    )


def timeline_of(batch: Batch) -> BatchPositions:
    """Return prompts and positions of all columns of `batch`, those of an encoder first."""
    num_new = batch.max_new_tokens + len(batch.decoder_start)
    return BatchPositions.of_batch(batch.prompts, batch.attention_mask, num_new)


def generate(
    loaded: LoadedModel, batch: Batch, sampling: dict[str, Any] | None = None
) -> Generated:
    """Generate greedily, or with the options `sampling`."""
    return _run(loaded, batch, LogitsProcessorList(), sampling or GREEDY)


def generate_forced(loaded: LoadedModel, batch: Batch, tokens_BN: Tensor) -> Generated:
    """Generate with the tokens (B, N) forced. Returns: the logits for each."""
    force = _Force(tokens_BN, _first_length(batch))
    return _run(loaded, batch, LogitsProcessorList([force]), GREEDY)


def limits_of_generation(
    loaded: LoadedModel, processing: ImageProcessing | str = ""
) -> ModelLimits:
    """Return the limits of the model's inputs, including those of its generation loop.

    processing: as `find_input_limits` takes it.

    Two tokens test if a prompt can be read in chunks, which depends on the model's cache class and
    its name in the model's outputs. A padded text tests if a recurrent model leaves padding out.
    """
    try:
        limits = _find_limits(loaded, processing)
    except UsageError as error:
        reason = error if isinstance(error, OutputError) else error.__cause__
        if not loaded.can_generate or not _returns_no_logits(reason, loaded):
            raise
        loaded = replace(loaded, can_generate=False)
        limits = replace(_find_limits(loaded, processing), only_forward=first_line(reason))
    if loaded.media_input:
        return limits
    if loaded.decoder_start:
        return replace(limits, whole_prefill="the encoder reads it in one call")
    token = next(id_ for id_ in range(loaded.vocab_size) if id_ != loaded.pad_token_id)
    if getattr(loaded.model, "_is_stateful", False) and _reads_padding(loaded, token):
        limits = replace(limits, reads_padding=True)
    if not loaded.can_generate:
        return limits
    two_chunks = Batch(0, ((token, token),), (0,), loaded.pad_token_id, 1, prefill_chunk=1)
    two_chunks = insert_media(two_chunks, limits, 0, ((),))
    try:
        generate(loaded, two_chunks)
    except Exception as error:  # noqa: BLE001 - model code raises anything
        return replace(limits, whole_prefill=first_line(error.__cause__ or error))
    return limits


# Arguments of `generate` that some models' own method does not take.
_OURS = re.compile(r"logits_processor|output_logits|return_dict_in_generate|generation_config")


def _returns_no_logits(error: BaseException | None, loaded: LoadedModel) -> TypeGuard[OutputError]:
    """Return True for an error of a `generate` that takes no processor of logits, needs an option, or returns something else."""
    model: Any = loaded.model
    usual, taken, given = (
        {*inspect.signature(one).parameters}
        for one in (GenerationMixin.generate, model.generate, model.forward)
    )
    return isinstance(error, OutputError) and (
        not error.raised
        or _OURS.search(str(error)) is not None
        or any(f"`{name}`" in str(error) for name in taken - usual - given)
    )


def _find_limits(loaded: LoadedModel, processing: ImageProcessing | str) -> ModelLimits:
    limits = find_input_limits(loaded, processing, generate)
    try:
        return with_additions(loaded, limits, generate)
    except OutputError as error:
        if loaded.can_generate and _returns_no_logits(error, loaded):
            raise
    return limits  # the check names what the model raises


# Of RWKV and RecurrentGemma, padding changes the logits by 0.08 or more.
_READ_PADDING = 1e-3


def _reads_padding(loaded: LoadedModel, token: int) -> bool:
    """Return True if padding before a text changes the first output at its last token."""
    short, long, generates = (token,) * 2, (token,) * 6, int(loaded.can_generate)
    texts = (
        generate(loaded, Batch(0, rows, (*range(len(rows)),), loaded.pad_token_id, generates))
        for rows in ((short,), (long, short))
    )
    alone, padded = (next(iter(text.outputs.values()))[-1, -1] for text in texts)
    rounding = 8 * torch.finfo(next(loaded.model.parameters()).dtype).eps
    allowed = max(_READ_PADDING, rounding) * alone.norm()
    # Attention of padding may be NaN, which a recurrence passes on.
    return not bool((padded - alone).norm() <= allowed)


def whole_text(batch: Batch, tokens_BN: Tensor) -> Batch:
    """Return a batch whose prompts are the prompts of `batch` and all new tokens but the last.

    tokens_BN: the new tokens, (B, N), N > 0.
    """
    rows = ((*row, *new) for row, new in zip(batch.rows, tokens_BN[:, :-1].tolist(), strict=True))
    num_read = tokens_BN.shape[1] - 1
    padded_to = batch.length + num_read
    return replace(batch, rows=tuple(rows), max_new_tokens=1, padded_to=padded_to)


def read_text(loaded: LoadedModel, batch: Batch, tokens_BN: Tensor) -> Tensor:
    """Compute the logits of all new tokens (B, N) in one call. Returns: (B, N, V), as `Generated` has."""
    num_new = tokens_BN.shape[1]
    kept: list[Tensor] = []

    def ask(_module: object, arguments: Any, named: dict[str, Any]) -> Any:  # noqa: ANN401 - of any model
        # Some models' generation asks for the number of logits in their configuration.
        return arguments, named | ({"logits_to_keep": num_new} if "logits_to_keep" in named else {})

    def keep(_module: object, _arguments: object, output: Any) -> None:  # noqa: ANN401 - of any model
        logits = output["logits"] if isinstance(output, dict) else output[0]
        kept.append(logits[:, -num_new:].float().cpu())

    hooks = (
        loaded.model.register_forward_pre_hook(ask, with_kwargs=True),
        loaded.model.register_forward_hook(keep),
    )
    try:
        _run(loaded, whole_text(batch, tokens_BN), LogitsProcessorList(), GREEDY)
    finally:
        for hook in hooks:
            hook.remove()
    return kept[0]


def generation_options(
    loaded: LoadedModel, batch: Batch, sampling: dict[str, Any]
) -> GenerationConfig:
    """Return the options of `model.generate` for this batch."""
    return GenerationConfig(
        max_new_tokens=batch.max_new_tokens,
        # A check needs a fixed number of tokens, so end-of-text is never chosen.
        min_new_tokens=batch.max_new_tokens if loaded.eos_token_ids else None,
        pad_token_id=loaded.pad_token_id,
        prefill_chunk_size=batch.prefill_chunk,
        num_beams=1,
        return_dict_in_generate=True,
        output_logits=True,
        **(sampling or GREEDY),
    )


@torch.no_grad()
def _run(
    loaded: LoadedModel,
    batch: Batch,
    processors: LogitsProcessorList,
    sampling: dict[str, Any],
) -> Generated:
    model: Any = loaded.model
    inputs = model_inputs(batch, next(model.parameters()))
    if not batch.max_new_tokens:
        if loaded.chooses_answers:
            inputs = {name: value[:, None] for name, value in inputs.items()}  # one to choose
        with model_code():
            output = model(**inputs)
        advance_task("tokens", len(batch.rows) * batch.length)
        outputs = name_outputs(output, loaded.vocab_size if batch.length else 0)
        return Generated(torch.zeros(len(batch.prompts), 0, dtype=torch.long), outputs)
    config = generation_options(loaded, batch, sampling)
    given: dict[str, Any] = {}
    if "encoder_hidden_states" in inputs:  # a decoder alone would mix them into its own cache
        given["past_key_values"] = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with model_code():
        result = model.generate(
            **inputs,
            generation_config=config,
            logits_processor=LogitsProcessorList([*processors, _Count(batch)]),
            **given,
        )
    sequences, steps = (getattr(result, name, None) for name in ("sequences", "logits"))
    if not isinstance(sequences, Tensor) or not isinstance(steps, list | tuple):
        raise OutputError(f"generate returned {type(result).__name__} without sequences and logits")
    del result  # holds every step's logits, and the cache
    num_rows, length = len(batch.rows), _first_length(batch)
    _require_tokens(sequences, num_rows, length, batch.max_new_tokens)
    steps = list(steps)
    if len(steps) != batch.max_new_tokens:
        raise OutputError(
            f"generate returned logits of {len(steps)} steps, not {batch.max_new_tokens}"
        )
    _require_logits(steps, (num_rows,))
    logits = _stack(steps)
    tokens = sequences[:, length:].cpu().long()
    if bool(((tokens < 0) | (tokens >= logits.shape[-1])).any()):
        known = f"0 to {logits.shape[-1] - 1}"
        raise OutputError(
            f"generate returned ids from {tokens.min()} to {tokens.max()}, not {known}"
        )
    return Generated(tokens, {LOGITS: logits})


def _values_among(named: Iterable[tuple[str, object]]) -> dict[str, Tensor]:
    return {
        name: value
        for name, value in named
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim
    }


def name_outputs(output: object, vocab_size: int) -> dict[str, Tensor]:
    """Name the floating-point tensors that a model returned, on the CPU.

    Logits over the vocabulary, (B, T, V), are called `LOGITS`. The others have the prefix "output-":
    hidden states (B, T, C), pooled embeddings (B, C), class scores (B, K).
    output: a dict of transformers, a tuple or a tensor. Single numbers such as losses, caches and the states of layers are left out.
    Raises: OutputError without any.
    """
    if isinstance(output, Mapping):
        named = [(str(name), value) for name, value in output.items()]
    else:
        values = output if isinstance(output, list | tuple) else [output]
        named = [(str(number), value) for number, value in enumerate(values)]
    found = _values_among(named)
    if not found:  # such as the feature maps of a backbone, or the outputs of parts
        found = _values_among(
            (f"{name}.{key}", one)
            for name, value in named
            if isinstance(value, list | tuple | Mapping)
            for key, one in (value.items() if isinstance(value, Mapping) else enumerate(value))
        )
    if not found:
        kinds = ", ".join(f"{name} of type {_kind_of(value)}" for name, value in named)
        raise OutputError(f"the model returned no floating-point tensor: {kinds or 'nothing'}")
    return {
        LOGITS
        if name in (LOGITS, "0") and value.ndim == 3 and value.shape[-1] == vocab_size
        else f"output-{name}": value.cpu()
        for name, value in found.items()
    }


def _kind_of(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


def _require_tokens(sequences: Tensor, num_rows: int, length: int, num_new: int) -> None:
    """Raise OutputError unless there are `num_new` ids for each row, behind prompts of `length`."""
    if sequences.ndim != 2 or sequences.shape[0] != num_rows:
        expected = f"{num_rows} rows of {length + num_new}"
        raise OutputError(f"generate returned ids of shape {list(sequences.shape)}, not {expected}")
    if (found := sequences.shape[1]) != length + num_new:
        parts = f"{length} of the prompt and {num_new} new ones"
        raise OutputError(f"generate returned {found} ids in each row, not {parts}")
    if sequences.is_floating_point() or sequences.is_complex() or sequences.dtype is torch.bool:
        raise OutputError(f"generate returned ids of dtype {sequences.dtype}")


def _require_logits(steps: Sequence[Any], shape: tuple[int, ...]) -> None:
    """Raise OutputError unless all `steps` are floating-point tensors of one shape (*shape, V)."""
    for step in steps:
        if not isinstance(step, Tensor) or not step.is_floating_point():
            kind = step.dtype if isinstance(step, Tensor) else type(step).__name__
            raise OutputError(f"the model returned logits of type {kind}")
        like = steps[0]
        if step.shape[:-1] != shape or step.shape != like.shape or not step.shape[-1]:
            expected = ", ".join(map(str, shape))
            raise OutputError(
                f"the model returned logits of shape {list(step.shape)}, not [{expected}, vocabulary]"
            )


def _stack(steps: list[Tensor]) -> Tensor:
    """Stack N logits (B, V) to (B, N, V); each is freed as soon as it is copied."""
    batch, vocabulary = steps[0].shape
    logits = torch.empty(batch, len(steps), vocabulary, dtype=steps[0].dtype)
    for number in reversed(range(len(steps))):
        logits[:, number] = steps.pop().cpu()
    return logits
