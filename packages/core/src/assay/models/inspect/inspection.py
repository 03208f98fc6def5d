"""Compare a loaded model with its files, in one report."""

# ruff: noqa: ANN401 - objects of transformers

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from assay.files import read_json_object
from assay.models.config_files import first_line, load_config, load_tokenizer
from assay.models.gguf_files import GGUF, read_gguf
from assay.models.inspect.config_keys import KeyReader, trace_reads
from assay.models.inspect.quantized_modules import (
    compare_quantized_modules,
    finish_loading,
    quantized_modules,
)
from assay.models.inspect.report import SetupChanges
from assay.models.inspect.second_model import (
    build_from_config,
    compare_made,
    compare_with_built,
    load_again,
)
from assay.models.inspect.weights import (
    Inspection,
    all_tensors,
    coarser_dtype,
    compare_with_files,
    measure_difference,
)
from assay.models.load import DTYPES, LoadedModel, name_padding_token, quantization_of
from assay.models.quantization.dequantizing import dequantize_folder, is_quantized
from assay.models.sources import RemoteCode, local_folder
from assay.models.stored_tensors import describe_stale_copies, map_folder
from assay.models.transformers_calls import quiet_transformers
from assay.progress import subtask
from assay.sites import unwrapped_path

_FEW_TOKENS = 4


def inspect_load(loaded: LoadedModel, remote_code: RemoteCode) -> Inspection:
    """Compare `loaded`, unchanged since `load_model`, with its files.

    Reads the weight files once. Changes neither the model nor the state of random generators.
    """
    dtype = DTYPES[loaded.dtype]
    with local_folder(loaded.source, remote_code) as folder, quiet_transformers():
        inspection = _compare_with_files(loaded, folder, dtype)
        report = inspection.report
        report.generation, report.notes = check_generation_config(folder, loaded.model)
        report.notes += describe_stale_copies(folder)
        with subtask("loading it once more without the files"):
            _inspect_second_load(inspection, loaded, folder, remote_code)
        if (file := folder / GGUF).is_file():
            report.settings += read_gguf(file).find_ignored_settings(loaded.config)
        if loaded.tokenizer_kind == "own":
            tokenizer = load_tokenizer(folder, remote_code)
            report.tokenizer, notes = check_tokenizer(
                tokenizer, loaded.config, loaded.eos_token_ids
            )
            report.notes += notes
    return inspection


def _compare_with_files(loaded: LoadedModel, folder: Path, dtype: torch.dtype) -> Inspection:
    """Compare the weights, quantized ones by what their modules compute."""
    model: Any = loaded.model
    computed = dtype if loaded.is_dequantized else torch.float32
    dequantized = dequantize_folder(folder, computed) if is_quantized(folder) else None
    if dequantized is None:
        return compare_with_files(model, map_folder(folder), dtype, quantization_of(model))
    if quantization_of(model) is None:
        # The loader dequantized (fp8 and MXFP4 on the CPU), and removed the setting.
        return compare_with_files(model, dequantized, dtype)
    modules = quantized_modules(model, dequantized)
    paths = frozenset(path for path, one in model.named_modules() if one in [*modules.values()])
    inspection = compare_with_files(model, dequantized.plain(), dtype, quantized=paths)
    finish_loading(model)
    compare_quantized_modules(
        modules, dequantized, (dtype, dequantized.dtype or dtype), inspection.report
    )
    return inspection


def _inspect_second_load(
    inspection: Inspection, loaded: LoadedModel, folder: Path, remote_code: RemoteCode
) -> None:
    """Load again without the files; compare computed tensors, and find unread keys."""
    report, dtype = inspection.report, _computed_dtype(loaded)
    raw = read_json_object(folder / "config.json")
    with trace_reads() as reads:
        config = _load_config(folder, remote_code)
        try:
            again = load_again(loaded.model, config, inspection, dtype)
        except Exception as error:  # noqa: BLE001 - the code of any model
            reason = f"a second load raised {type(error).__name__}: {first_line(error)}"
            unknown = [*inspection.made, "which keys of config.json are read"]
            report.not_compared += [f"{name} ({reason})" for name in unknown]
            return
        keys = KeyReader(reads, type(again))
        unread, report.num_keys = keys.find_unread(raw, config)
        if unread:
            # Only the forward pass reads some keys. Reads before an error count.
            with torch.no_grad(), suppress(Exception):
                again(input_ids=torch.arange(_FEW_TOKENS)[None] % 2)
            unread, report.num_keys = keys.find_unread(raw, config)
    report.keys = unread
    compare_made(inspection.made, again, dtype, report)
    _inspect_built(inspection, loaded, folder, remote_code)


def _load_config(folder: Path, remote_code: RemoteCode) -> Any:
    """Load the configuration again, without quantization: its weights are compared by other means."""
    config = load_config(folder, remote_code)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _inspect_built(
    inspection: Inspection, loaded: LoadedModel, folder: Path, remote_code: RemoteCode
) -> None:
    report = inspection.report
    build = partial(_build, loaded, folder, remote_code)
    try:
        found = compare_with_built(loaded.model, inspection.made, build, _computed_dtype(loaded))
    except Exception as error:  # noqa: BLE001 - the code of any model
        reason = f"building it raised {type(error).__name__}: {first_line(error)}"
        report.not_compared.append(f"what its class makes of config.json alone ({reason})")
        return
    known = {weight.name for weight in report.weights}
    report.weights += [weight for weight in found.weights if weight.name not in known]
    report.not_compared += found.not_compared
    if inspection.quantized:
        # The library replaced modules and their attributes; what they compute was compared.
        starts = [f"{path}{end}" for path in inspection.quantized for end in (" ", ".")]
        starts += ["quantization_method ", "(model).config.quantization_config."]
        others = [one for one in found.settings if not one.startswith(tuple(starts))]
        report.notes += [f"set by the quantization: {one}" for one in others]
    elif quantization_of(loaded.model):
        report.not_compared += found.settings  # loading replaces modules
    else:
        report.settings = found.settings


def build_again(loaded: LoadedModel, remote_code: RemoteCode) -> nn.Module:
    """Build the class of a loaded model from config.json alone, with buffers in float32."""
    with local_folder(loaded.source, remote_code) as folder, quiet_transformers():
        return _build(loaded, folder, remote_code, torch.float32)


def _build(
    loaded: LoadedModel, folder: Path, remote_code: RemoteCode, dtype: torch.dtype
) -> nn.Module:
    config = _load_config(folder, remote_code)
    built = build_from_config(loaded.model, config, dtype)
    name_padding_token(built, loaded.pad_token_id)
    return built


def _computed_dtype(loaded: LoadedModel) -> torch.dtype:
    """Return the dtype of the buffers before `load_model` widened them to float64."""
    widened = loaded.dtype == "float64" and loaded.checkpoint_dtype != "float64"
    return torch.float32 if widened else DTYPES[loaded.dtype]


def inspect_changes(
    model: nn.Module, dtype: torch.dtype, before: Inspection, names: Iterable[str]
) -> SetupChanges:
    """Find changes of the named parameters and buffers since `before`.

    model: the model after the setup function, possibly wrapped or replaced.
    dtype: the dtype of the load.
    """
    now = {unwrapped_path(name): tensor.detach() for name, tensor in all_tensors(model)}
    changes = SetupChanges()
    for name in names:
        actual = now.get(name)
        expected = None if actual is None else before.find_expected(name, actual)
        if expected is not None and actual is not None and name in before.sources:
            expected = expected.to(actual.dtype)
        if (
            actual is None
            or expected is None
            or (expected.shape, expected.dtype) != (actual.shape, actual.dtype)
        ):
            changes.replaced.append(name)
            continue
        rounded = coarser_dtype(actual.dtype, dtype)
        found = measure_difference(name, actual.cpu(), expected, rounded)
        changes.weights += [found] if found is not None else []
    return changes


_TEXT = "What is it?"
_MESSAGES = [{"role": "user", "content": _TEXT}]


def check_tokenizer(
    tokenizer: Any, config: Any, eos_token_ids: Sequence[int]
) -> tuple[list[str], list[str]]:
    """Return errors of the tokenizer, and correct properties that are easy to misuse."""
    wrong: list[str] = []
    notes: list[str] = []
    bos = tokenizer.bos_token_id
    if bos is not None and (count := _leading(tokenizer.encode(_TEXT), bos)) > 1:
        wrong.append(f"a text begins with {count} BOS tokens ({tokenizer.bos_token}, id {bos})")
    vocabulary = config.get_text_config().vocab_size
    if (largest := max(tokenizer.get_vocab().values(), default=0)) >= vocabulary:
        notes.append(f"the tokenizer has the id {largest}, the model's vocabulary {vocabulary} ids")
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    if eos is not None and eos_token_ids and eos not in eos_token_ids:
        notes.append(
            f"the tokenizer ends a text with {tokenizer.eos_token} (id {eos}), the model stops at"
            f" {', '.join(map(str, eos_token_ids))}"
        )
    if pad is not None and pad == eos:
        notes.append(
            f"padding is EOS ({tokenizer.eos_token}, id {eos}): labels masked by this id lose the"
            " end of each text; mask by the attention mask"
        )
    if tokenizer.chat_template:
        more_wrong, more_notes = _check_template(tokenizer)
        wrong += more_wrong
        notes += more_notes
    return wrong, notes


def _check_template(tokenizer: Any) -> tuple[list[str], list[str]]:
    try:
        text = tokenizer.apply_chat_template(_MESSAGES, add_generation_prompt=True, tokenize=False)
        encoded = tokenizer.apply_chat_template(
            _MESSAGES, add_generation_prompt=True, return_dict=True
        )
    except Exception as error:  # noqa: BLE001 - the model's author wrote the template
        return [f"the chat template raises {type(error).__name__}: {error}"], []
    ids = list(encoded["input_ids"])
    bos = tokenizer.bos_token_id
    wrong, notes = [], []
    if bos is not None and (count := _leading(ids, bos)) > 1:
        wrong.append(f"a chat begins with {count} BOS tokens ({tokenizer.bos_token}, id {bos})")
    if ids != list(tokenizer.encode(text, add_special_tokens=False)):
        wrong.append("the ids of a chat are not those of the text that its template makes")
    if bos is not None and _leading(tokenizer.encode(text), bos) > _leading(ids, bos) > 0:
        notes.append(
            f"the chat template writes BOS ({tokenizer.bos_token}, id {bos}), and the tokenizer adds"
            " it again: tokenize its text with add_special_tokens=False"
        )
    return wrong, notes


def _leading(ids: Sequence[int], token: int) -> int:
    return len([*takewhile(lambda id_: id_ == token, ids)])


def check_generation_config(folder: Path, model: Any) -> tuple[list[str], list[str]]:
    """Return settings of generation_config.json that `model` lacks, and contradictions to config.json."""
    path = folder / "generation_config.json"
    own = getattr(model, "generation_config", None)
    if not path.is_file() or own is None:
        return [], []
    settings = read_json_object(path)
    wrong = [
        f"{key} is {used!r}, generation_config.json says {value!r}"
        for key, (value, used) in other_generation_settings(settings, own).items()
    ]
    ends = [_ends_of_text(one) for one in (settings, read_json_object(folder / "config.json"))]
    if not ends[1] or ends[1] <= ends[0]:
        return wrong, []
    texts = [", ".join(map(str, sorted(one))) or "none" for one in ends]
    note = (
        f"config.json ends a text with the id {texts[1]}, generation_config.json with {texts[0]}:"
        " generation follows generation_config.json"
    )
    return wrong, [note]


def other_generation_settings(
    settings: Mapping[str, Any], own: Any
) -> dict[str, tuple[object, object]]:
    """Return the file's value and the one in use of each setting of generation that differs."""
    return {
        key: (value, getattr(own, key, None))
        for key, value in settings.items()
        if not key.startswith("_")
        and key != "transformers_version"
        and value is not None
        and getattr(own, key, None) != value
    }


def find_second_begins(tokenizer: Any) -> Iterator[tuple[str, list[int], int]]:
    """Yield what begins with several BOS tokens, its token ids, and the number of BOS tokens."""
    ids = {"a text": list(tokenizer.encode(_TEXT))}
    if tokenizer.chat_template:
        options = {"add_generation_prompt": True, "return_dict": True}
        ids["a chat"] = list(tokenizer.apply_chat_template(_MESSAGES, **options)["input_ids"])
    for what, tokens in ids.items():
        bos = tokenizer.bos_token_id
        if bos is not None and (count := _leading(tokens, bos)) > 1:
            yield what, tokens, count


def _ends_of_text(settings: Mapping[str, Any]) -> set[int]:
    inner = settings.get("text_config")
    ids = settings.get(
        "eos_token_id", inner.get("eos_token_id") if isinstance(inner, dict) else None
    )
    return {one for one in (ids if isinstance(ids, list) else [ids]) if isinstance(one, int)}
