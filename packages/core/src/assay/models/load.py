"""Load models for comparison: exact weights, a chosen dtype, evaluation mode; their size, and what follows from it."""

import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from assay.errors import MachineError, UsageError, name_some
from assay.models import weight_files
from assay.models.config_files import (
    NUM_BYTES,
    Message,
    Settings,
    attention_of,
    find_model_class,
    find_tokenizing,
    first_line,
    load_config,
)
from assay.models.gguf_files import GGUF
from assay.models.quantization.dequantizing import (
    DequantizedTensors,
    dequantize_folder,
    is_quantized,
)
from assay.models.sources import (
    ModelSource,
    RemoteCode,
    fetch_config,
    local_folder,
    resolve_model,
    transformers_option,
    weightless_folder,
)
from assay.models.stored_tensors import pickled_dtype, pickled_weights
from assay.models.tensor_sources import UnknownFormError, find_sources, value_in_form
from assay.models.transformers_calls import quiet_transformers
from assay.models.weight_files import StoredWeight, combine_hashes
from assay.progress import counted

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


FUSED = "sdpa"
"""The name of torch's fused attention in transformers."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode with its tokenizer and properties."""

    model: nn.Module
    source: ModelSource
    config: "PretrainedConfig"
    """Hugging Face configuration, of the text part if there are several."""
    dtype: str
    encode: Callable[[str], list[int]]
    encode_chat: Callable[[Sequence[Message]], list[int]] | None
    """Apply the chat template; None if there is none."""
    tokenizer_kind: Literal["own", "bytes", "none"]
    tokenizer_hash: str
    checkpoint_dtype: str
    """Dtype of most stored weights."""
    stored_weights: Mapping[str, StoredWeight]
    vocab_size: int
    """0 for a model without tokens."""
    max_positions: int | None
    """Length of the longest sequence; None without a limit."""
    pad_token_id: int
    eos_token_ids: tuple[int, ...]
    can_generate: bool
    decoder_start: tuple[int, ...] = ()
    """First ids of the decoder of an encoder-decoder; empty for other models."""
    media_input: str = ""
    """The argument for images or sounds of a model that takes them without text, or apart from it; "" for others."""
    media_token_id: int | None = None
    """The token that an image, or otherwise a sound, in a text replaces; None for a model that has none."""
    is_dequantized: bool = False
    """The files are quantized, and this model was made of their values without the library."""
    notes: tuple[str, ...] = field(default=())
    """Sentences for the user."""

    @property
    def chooses_answers(self) -> bool:
        """Return True if the model scores several answers to a question, (B, choices, T) ids."""
        from transformers.models.auto import modeling_auto

        known = modeling_auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES.values()
        return type(self.model).__name__ in known

    @property
    def reads_tokens(self) -> bool:
        """Return True unless the model takes images or sounds alone."""
        return "input_ids" in inspect.signature(self.model.forward).parameters

    def require_language_model(self) -> "LoadedModel":
        """Return itself. Raises: UsageError unless the model computes logits of the tokens that it reads."""
        self.require_text_model()
        if getattr(self.model, "get_output_embeddings", lambda: None)() is None:
            raise self._unfit("has no language-model head")
        return self

    def require_text_model(self) -> "LoadedModel":
        """Return itself. Raises: UsageError unless one call of the model reads tokens alone."""
        if self.decoder_start:
            raise self._unfit("is an encoder-decoder")
        if self.media_input:
            raise self._unfit(f"takes {self.media_input}")
        return self

    def _unfit(self, why: str) -> UsageError:
        return UsageError(
            f"{self.source.reference}: {type(self.model).__name__} {why}; `assay check generate` and"
            " `assay check load` are for it"
        )

    @property
    def weights_hash(self) -> str:
        """Hash the checkpoint, independently of its division into files."""
        return combine_hashes({name: one.hash for name, one in self.stored_weights.items()})


def load_model(  # noqa: PLR0913 - choices of one load
    model: ModelSource | str,
    *,
    dtype: str,
    device: str = "cpu",
    attention: str | None = None,
    experts: str | None = None,
    rounded_to: str | None = None,
    remote_code: RemoteCode = "refuse",
    weights: Literal["as stored", "dequantized"] = "as stored",
    config_folder: Path | None = None,
) -> LoadedModel:
    """Load `model` with its weights rounded to `dtype`.

    Args:
        dtype: Float64, for the yardstick, widens the exact stored weights, and the floating-point
            buffers as computed in float32.
        rounded_to: The dtype to which weights and buffers are rounded before they are widened to `dtype`.
            The model then computes exactly with the values of a run in `rounded_to` (Gemma's embedding
            scale is 9.8125 in bfloat16 and 9.798 in float32).
        attention, experts: Names of transformers' implementations; None for its default, except that
            float64 uses the eager experts because the grouped product refuses float64.
        weights: "dequantized" makes a plain model of a quantized folder, without its library. In `dtype` it
            rounds scales, then their products with the codes, as the least accurate libraries do. With
            `rounded_to` stored weights are exact all the same.
        config_folder: Folder of another config.json to use instead of the model's.

    Raises:
        UsageError: The folder does not hold a complete model of a known type.
    """
    source = resolve_model(model) if isinstance(model, str) else model
    for name in (dtype, rounded_to or dtype):
        if name not in DTYPES:
            raise UsageError(f"models cannot be loaded in {name!r}; known: {', '.join(DTYPES)}")
    if dtype == "float64" and experts is None:
        experts = "eager"
    with local_folder(source, remote_code) as folder, quiet_transformers():
        tensors = weight_files.read_tensors(folder)
        # Pickled files are refused before transformers reads them.
        checkpoint_dtype = (
            pickled_dtype(folder) if tensors is None else weight_files.checkpoint_dtype(tensors)
        )
        config = load_config(config_folder or folder, remote_code)
        load_dtype = DTYPES[rounded_to or dtype]
        if load_dtype is torch.float64 and not (tensors and weight_files.holds_float64(tensors)):
            # float32 represents every stored value, and is the usual dtype of buffers.
            load_dtype = torch.float32
        options = {"attn_implementation": attention, "experts_implementation": experts}
        exact = None
        if weights == "dequantized" and is_quantized(folder):
            exact = dequantize_folder(folder, load_dtype)
        module, notes = _load_weights(folder, config, load_dtype, options, remote_code, exact)
        if dtype == "float64" or rounded_to is not None:
            if (method := quantization_of(module)) is not None:
                raise UsageError(
                    f"{source.reference}: weights quantized by {method} cannot be widened"
                )
            widen(module, DTYPES[dtype])
            if exact is not None and (exact := dequantize_folder(folder)):
                _copy_exact(exact, module)
        stored = weight_files.stored_weights(tensors) if tensors else pickled_weights(folder)
        loaded = _describe(module, source, folder, remote_code)
    return replace(
        loaded,
        model=module.to(device).eval(),
        dtype=dtype,
        checkpoint_dtype=checkpoint_dtype,
        stored_weights=stored,
        is_dequantized=exact is not None,
        notes=(*notes, *loaded.notes),
    )


def load_outline(
    model: ModelSource | str,
    remote_code: RemoteCode = "refuse",
    attention: str = "eager",
    experts: str = "batched_mm",  # others read values
) -> LoadedModel:
    """Load `model` without its weights: parameters have shapes, on the meta device, and no values.

    attention, experts: names of transformers' implementations.
    Raises: UsageError as `load_model`; whatever the model's code raises without values.
    """
    source = resolve_model(model) if isinstance(model, str) else model
    with weightless_folder(source, remote_code) as folder, quiet_transformers():
        config = load_config(folder, remote_code)
        config._attn_implementation = attention  # noqa: SLF001 - no public name
        config._experts_implementation = experts  # noqa: SLF001 - as above
        model_class = find_model_class(folder, config, remote_code)
        with torch.device("meta"):
            module: Any = model_class(config)
        return _describe(module.eval(), source, folder, remote_code)


def _describe(
    module: Any,  # noqa: ANN401 - any Hugging Face model
    source: ModelSource,
    folder: Path,
    remote_code: RemoteCode,
) -> LoadedModel:
    """Return the properties of a model that do not depend on its weights."""
    try:
        config = module.config.get_text_config()
    except ValueError as error:  # a text encoder and a decoder of something else
        raise UsageError(f"{source.reference}: {first_line(error)}") from error
    # A model without a vocabulary that reads ids accepts any, as CANINE hashes code points.
    vocab_size = getattr(config, "vocab_size", None) or 0
    if not vocab_size and "input_ids" in inspect.signature(module.forward).parameters:
        vocab_size = Settings(module.config).read("vocab_size") or NUM_BYTES
    tokenizing = find_tokenizing(
        folder,
        vocab_size=vocab_size,
        bos_token_id=getattr(config, "bos_token_id", None),
        remote_code=remote_code,
    )
    notes = list(_name_unused_code(module, remote_code))
    if tokenizing.kind == "bytes" and source.kind != "micro":
        notes.append("no tokenizer files: text is encoded as the bytes of UTF-8")
    if tokenizing.kind == "none" and vocab_size:
        notes.append(
            f"no tokenizer files: the vocabulary is too small for bytes, which are taken modulo {vocab_size}"
        )
    eos_token_ids = _eos_token_ids(module, config)
    pad_token_id = _pad_token_id(tokenizing.pad_token_id, config, vocab_size, eos_token_ids)
    if name_padding_token(module, pad_token_id):
        notes.append(
            f"config.json names no padding token: {pad_token_id} stands for it on both sides"
        )
    return LoadedModel(
        model=module,
        source=source,
        config=config,
        dtype="",
        encode=tokenizing.encode,
        encode_chat=tokenizing.encode_chat,
        tokenizer_kind=tokenizing.kind,
        tokenizer_hash=tokenizing.hash,
        checkpoint_dtype="",
        stored_weights={},
        vocab_size=vocab_size,
        max_positions=_max_positions(config, module),
        pad_token_id=pad_token_id,
        eos_token_ids=eos_token_ids,
        can_generate=bool(module.can_generate()) and not _scores_frames(module),
        decoder_start=_decoder_start(module),
        media_input=_media_input(module),
        media_token_id=_media_token_id(module),
        notes=tuple(notes),
    )


def name_padding_token(module: Any, pad_token_id: int) -> bool:  # noqa: ANN401 - as `_describe`
    """Name a padding token for a classifier without one, which takes the scores of the last token before padding.

    Returns: True if it had none.
    """
    config = module.config.get_text_config()
    lacks_one = hasattr(module, "num_labels") and getattr(config, "pad_token_id", None) is None
    if lacks_one:
        config.pad_token_id = pad_token_id
    return lacks_one


def _name_unused_code(module: Any, remote_code: RemoteCode) -> Iterator[str]:  # noqa: ANN401 - as `_describe`
    """Say that code which config.json names did not run. transformers then runs its own class without a word."""
    named = getattr(module.config, "auto_map", None) or {}
    codes = {str(code) for name, code in named.items() if name.startswith("AutoModel")}
    if codes and remote_code == "refuse":
        files = {f"{code.rpartition('--')[2].partition('.')[0]}.py" for code in codes}
        yield (
            f"{name_some(sorted(files))} of the model did not run: {type(module).__name__} of transformers ran"
            " instead; --trust-remote-code runs the model's own code"
        )


def add_biases_last(model: nn.Module) -> None:
    """Make every biased linear layer round its product before it adds the bias.

    This is the least accurate correct order, used by row-parallel layers and by devices without a
    fused addition. If a product hardly varies, its rounding error has the same sign for a whole
    channel, which a noise run with fused biases would not show.
    """
    for module in model.modules():
        if type(module).forward is nn.Linear.forward and module.bias is not None:
            module.forward = _bias_last(cast("nn.Linear", module))


def _bias_last(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    return lambda input: functional.linear(input, linear.weight) + linear.bias  # noqa: A006


def use_fused_attention(model: nn.Module) -> bool:
    """Switch `model` to torch's fused attention. Returns: False if its class lacks it."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        with suppress(ValueError, ImportError):
            model.set_attn_implementation(FUSED)
    return attention_of(model) == FUSED


def stored_dtype(model: str, remote_code: RemoteCode) -> str:
    """Return the dtype of most stored weights of `model`, without loading it."""
    with local_folder(resolve_model(model), remote_code) as folder:
        tensors = weight_files.read_tensors(folder)
        return weight_files.checkpoint_dtype(tensors) if tensors else pickled_dtype(folder)


def _load_weights(
    folder: Path,
    config: "PretrainedConfig",
    dtype: torch.dtype,
    options: dict[str, str | None],
    remote_code: RemoteCode,
    exact: DequantizedTensors | None,
) -> tuple[Any, list[str]]:
    model_class = find_model_class(folder, config, remote_code)
    given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    trusted = transformers_option(remote_code) if remote_code == "trust" else {}
    if (folder / GGUF).is_file():
        del config.quantization_config
        given |= {"gguf_file": GGUF} if exact is None else {}
    elif exact is not None:
        del config.quantization_config
    if exact is not None:
        given["state_dict"] = {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in exact.items()
        }
    try:
        # Mismatched sizes are refused by name below.
        module, info = model_class.from_pretrained(
            folder if exact is None else None,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            local_files_only=True,
            **given,
            **trusted,
        )
    except torch.OutOfMemoryError as error:
        raise MachineError(f"not enough memory for {folder}: {first_line(error)}") from error
    except Exception as error:  # any: each model class fails differently
        raise UsageError(
            f"{folder} cannot be loaded as {model_class.__name__}: {first_line(error)}"
        ) from error
    if "gguf_file" in given and all(one.is_floating_point() for one in module.parameters()):
        # The loader dequantized all weights, but leaves its settings.
        del module.config.quantization_config, module.quantization_method
    if exact is not None and (folder / "generation_config.json").is_file():
        from transformers import GenerationConfig

        module.generation_config = GenerationConfig.from_pretrained(folder)
    _refuse_incomplete(folder, info)
    unexpected = sorted(info["unexpected_keys"])
    notes = []
    if unexpected:
        notes.append(
            f"the checkpoint holds tensors that the model does not use: {name_some(unexpected)}"
        )
    return module, notes


def quantization_of(model: Any) -> str | None:  # noqa: ANN401 - any Hugging Face model
    """Return the method by which the files of `model` are quantized; None if they are not."""
    settings = getattr(model.config, "quantization_config", None)
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else settings.quant_method
    return str(getattr(method, "value", method))


def _copy_exact(exact: DequantizedTensors, module: nn.Module) -> None:
    """Replace rounded parameters by the stored values, dequantized in float32."""
    parameters = dict(module.named_parameters())
    for source in counted("restores weights", find_sources(module, exact).sources, "tensors"):
        held = parameters.get(source.name)
        if held is not None:
            with suppress(UnknownFormError):
                held.data.copy_(value_in_form(source, held))


class IncompleteWeightsError(UsageError):
    """The files lack parameters of the model.

    missing: their names.
    unused: names of stored tensors that the model does not use.
    """

    def __init__(self, folder: Path, missing: list[str], unused: list[str]) -> None:
        held = f", and hold {name_some(unused)}, which the model does not use" if unused else ""
        super().__init__(f"{folder}: the weights lack {name_some(missing)}{held}")
        self.missing, self.unused = missing, unused


def _refuse_incomplete(folder: Path, info: dict[str, Any]) -> None:
    """Raise UsageError for parameters that transformers filled with random numbers."""
    mismatched = sorted(info["mismatched_keys"])
    if mismatched:
        name, stored, needed = mismatched[0]
        raise UsageError(
            f"{folder}: {name} has the shape {list(stored)}, the model needs {list(needed)}"
            + (f" (and {len(mismatched) - 1} more)" if len(mismatched) > 1 else "")
        )
    if missing := sorted(info["missing_keys"]):
        raise IncompleteWeightsError(folder, missing, sorted(info["unexpected_keys"]))


def widen(module: nn.Module, dtype: torch.dtype, largest: int = sys.maxsize) -> None:
    """Widen all floating-point buffers, and the parameters of at most `largest` elements."""
    with torch.no_grad():
        for parameter in counted("widens weights", [*module.parameters()], "tensors"):
            if parameter.is_floating_point() and parameter.numel() <= largest:
                parameter.data = parameter.data.to(dtype)
        for owner in module.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    owner._buffers[name] = buffer.to(dtype)  # noqa: SLF001 - keeps persistence


def _eos_token_ids(module: nn.Module, config: "PretrainedConfig") -> tuple[int, ...]:
    generation = getattr(module, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = getattr(config, "eos_token_id", None)
    found = ids if isinstance(ids, list | tuple) else (ids,)
    return tuple(id_ for id_ in found if isinstance(id_, int))


def _decoder_start(module: Any) -> tuple[int, ...]:  # noqa: ANN401 - as `_describe`
    """Return the first ids of the decoder; () without one, or if a classifier gives it the text."""
    parameters = inspect.signature(module.forward).parameters
    is_pair = (
        getattr(module.config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters
    )
    if not is_pair or ("labels" in parameters and not module.can_generate()):
        return ()
    settings = (getattr(module, "generation_config", None), module.config)
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    found = (getattr(one, name, None) for name in names for one in settings)
    return (next((id_ for id_ in found if isinstance(id_, int)), 0),)


def _scores_frames(module: nn.Module) -> bool:
    """Return True for a model of CTC, whose `generate` only takes the best token of each frame."""
    from transformers.models.auto import modeling_auto

    return type(module).__name__ in modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES.values()


def _max_positions(config: "PretrainedConfig", model: nn.Module) -> int | None:
    """Return the length of the longest sequence, which configurations name differently.

    RoBERTa's table of positions has rows for padding before the other positions.
    """
    for name in ("max_position_embeddings", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:  # -1 in XLNet, which has no limit
            break
    else:
        return None
    for path, part in model.named_modules():
        padding = getattr(part, "padding_idx", None)
        if path.endswith("position_embeddings") and isinstance(padding, int):
            return value - padding - 1
    return value


# Keys of a configuration whose model puts images or sounds between the tokens of a text.
_TOKENS_OF_MEDIA = re.compile(r".*(image|img|video|vision|audio|speech).*_token_(id|index)")
# An argument that is 1 at the tokens of a text that the values of an image replace, whatever their ids.
IMAGE_PLACES = re.compile(r"image_embeds_position_mask")
_MEDIA = ("pixel_values", "pixel_values_videos", "input_values", "input_features")


def _media_input(module: Any) -> str:  # noqa: ANN401 - as `_describe`
    """Return the argument for images or sounds of a model that takes them without text, or apart from it.

    Models that put images between the tokens of a text have a `media_token_id` instead.
    """
    parameters = inspect.signature(module.forward).parameters
    if "input_ids" not in parameters:
        named = getattr(module, "main_input_name", "")
        names = [named] if isinstance(named, str) else named
        # `main_input_name` has a default that the forward call of a tower may lack.
        return next((name for name in (*names, *parameters) if name in parameters), "")
    known = [name for name in _MEDIA if name in parameters]
    keys = {key for part in Settings(module.config).parts for key in vars(part)}
    is_mixed = any(map(_TOKENS_OF_MEDIA.fullmatch, keys)) or any(
        map(IMAGE_PLACES.fullmatch, parameters)
    )
    return known[0] if known and not is_mixed and not module.can_generate() else ""


def _media_token_id(module: Any) -> int | None:  # noqa: ANN401 - as `_describe`
    """Return the token that stands for an image in a text, or for a sound in a model without images."""
    names = (f"{kind}_token_{end}" for kind in ("image", "audio") for end in ("id", "index"))
    parts = Settings(module.config).parts
    found = (getattr(part, name, None) for name in names for part in parts)
    is_any = any(map(IMAGE_PLACES.fullmatch, inspect.signature(module.forward).parameters))
    return next((id_ for id_ in found if isinstance(id_, int)), 0 if is_any else None)


def _pad_token_id(
    own: int | None,
    config: "PretrainedConfig",
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
) -> int:
    candidates = (own, getattr(config, "pad_token_id", None), *eos_token_ids[:1])
    known = [id_ for id_ in candidates if id_ is not None and 0 <= id_ < vocab_size]
    return known[0] if known else 0


# Below this size a second thread costs more time than it saves: operations take microseconds.
SMALL_MODEL_PARAMETERS = 20_000_000

# Up to this size the yardstick is computed in float64, which takes twice the memory of float32.
# The limit is a choice; the verdict names the dtype.
FLOAT64_PARAMETERS = 2_000_000_000


def yardstick_dtype(num_parameters: int, supported: Collection[str]) -> str:
    """Return the dtype of the yardstick; `supported`: dtypes of the device."""
    small = num_parameters <= FLOAT64_PARAMETERS
    return "float64" if small and "float64" in supported else "float32"


def choose_threads(num_parameters: int) -> None:
    """Make torch use one thread for small models, and its default for others."""
    if num_parameters < SMALL_MODEL_PARAMETERS:
        torch.set_num_threads(1)


@contextmanager
def chosen_threads(num_parameters: int) -> Iterator[None]:
    """Apply `choose_threads` inside the context, and restore the number on exit."""
    with limited_threads(torch.get_num_threads()):
        choose_threads(num_parameters)
        yield


@contextmanager
def limited_threads(num_threads: int) -> Iterator[None]:
    """Let torch use this many threads inside the context, and restore the number on exit."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def count_parameters(model: ModelSource | str) -> int:
    """Count the parameters by the headers of the files of `model`, otherwise by its configuration."""
    source = resolve_model(model) if isinstance(model, str) else model
    folder = source.recipe.folder if source.recipe and source.trained else source.folder
    is_plain = folder is not None and not is_quantized(folder)  # packed values would be miscounted
    tensors = weight_files.read_tensors(folder) if folder is not None and is_plain else None
    if tensors is not None:
        return sum(tensor.num_elements for tensor in tensors)
    return _count_on_meta(source)


def _count_on_meta(source: ModelSource) -> int:
    import transformers

    from assay.models.micro.recipes import new_config

    with quiet_transformers(), torch.device("meta"):
        if source.recipe is not None:
            config = new_config(source.recipe)
        elif source.file is not None:
            with local_folder(source, "refuse") as folder:
                config = load_config(folder, "refuse")
        else:
            config = load_config(source.folder or fetch_config(source.reference), "refuse")
        name = (config.architectures or [""])[0]
        model_class: Any = getattr(transformers, name, transformers.AutoModel.from_config)
        model: torch.nn.Module = model_class(config)
    return sum(value.numel() for value in model.parameters())
