"""Compare a loaded model with its files, in one report."""

# ruff: noqa: ANN401 - objects of transformers

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from assay.files import read_json_object
from assay.models.folders import local_folder
from assay.models.loaded.config_keys import KeyReader, trace_reads
from assay.models.loaded.differences import measure_difference
from assay.models.loaded.report import SetupChanges
from assay.models.loaded.second_model import (
    build_from_config,
    compare_made,
    compare_with_built,
    load_again,
)
from assay.models.loaded.tokenizer import check_generation_config, check_tokenizer
from assay.models.loaded.weights import (
    Inspection,
    UnknownFormError,
    all_tensors,
    coarser_dtype,
    compare_with_files,
    quantization_of,
    value_in_form,
)
from assay.models.loading.configs import first_line, load_config
from assay.models.loading.loaded_model import DTYPES, LoadedModel
from assay.models.loading.tokenizing import load_tokenizer
from assay.models.quantization.dequantizing import dequantize_folder
from assay.models.remote_code import RemoteCode
from assay.models.transformers_logging import quiet_transformers
from assay.models.weight_files.mapping import describe_stale_copies, map_folder
from assay.progress import subtask
from assay.sites import unwrapped_path

_FEW_TOKENS = 4


def inspect_load(loaded: LoadedModel, remote_code: RemoteCode) -> Inspection:
    """Compare `loaded`, unchanged since `load_model`, with its files.

    Reads the weight files once. Changes neither the model nor the state of random generators.
    """
    dtype = DTYPES[loaded.dtype]
    with local_folder(loaded.source, remote_code) as folder, quiet_transformers():
        method = quantization_of(loaded.model)
        stored: Mapping[str, Tensor] | None = map_folder(folder)
        if method is None and (settings := _quantization_in(folder)):
            # The loader dequantized (fp8 and MXFP4 on the CPU), and removed the setting.
            stored = dequantize_folder(folder)
            method = None if stored is not None else str(settings.get("quant_method"))
        inspection = compare_with_files(loaded.model, stored or map_folder(folder), dtype, method)
        report = inspection.report
        report.generation, report.notes = check_generation_config(folder, loaded.model)
        report.notes += describe_stale_copies(folder)
        with subtask("loads it once more without the files"):
            _inspect_second_load(inspection, loaded, folder, remote_code)
        if loaded.tokenizer_kind == "own":
            tokenizer = load_tokenizer(folder, remote_code)
            report.tokenizer, notes = check_tokenizer(
                tokenizer, loaded.config, loaded.eos_token_ids
            )
            report.notes += notes
    return inspection


def _inspect_second_load(
    inspection: Inspection, loaded: LoadedModel, folder: Path, remote_code: RemoteCode
) -> None:
    """Load again without the files; compare computed tensors, and find unread keys."""
    report, dtype = inspection.report, _computed_dtype(loaded)
    raw = read_json_object(folder / "config.json")
    with trace_reads() as reads:
        config = _load_config(loaded, folder, remote_code)
        try:
            again = load_again(loaded.model, config, list(inspection.sources), dtype)
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


def _quantization_in(folder: Path) -> Mapping[str, Any]:
    settings = read_json_object(folder / "config.json").get("quantization_config")
    return settings if isinstance(settings, dict) else {}


def _load_config(loaded: LoadedModel, folder: Path, remote_code: RemoteCode) -> Any:
    """Load the configuration again, without the quantization that the loader removed."""
    config = load_config(folder, remote_code)
    if quantization_of(loaded.model) is None and hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _inspect_built(
    inspection: Inspection, loaded: LoadedModel, folder: Path, remote_code: RemoteCode
) -> None:
    report = inspection.report

    def build(dtype: torch.dtype) -> nn.Module:
        return build_from_config(loaded.model, _load_config(loaded, folder, remote_code), dtype)

    try:
        found = compare_with_built(loaded.model, inspection.made, build, _computed_dtype(loaded))
    except Exception as error:  # noqa: BLE001 - the code of any model
        reason = f"building it raised {type(error).__name__}: {first_line(error)}"
        report.not_compared.append(f"what its class makes of config.json alone ({reason})")
        return
    known = {weight.name for weight in report.weights}
    report.weights += [weight for weight in found.weights if weight.name not in known]
    report.not_compared += found.not_compared
    if quantization_of(loaded.model):
        # Loading replaces modules.
        report.not_compared += found.settings
    else:
        report.settings = found.settings


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
        actual, source = now.get(name), before.sources.get(name)
        if actual is None:
            changes.replaced.append(name)
            continue
        try:
            expected = (
                before.made.get(name)
                if source is None
                else value_in_form(source, actual).to(actual.dtype)
            )
        except UnknownFormError:
            expected = None
        if expected is None or (expected.shape, expected.dtype) != (actual.shape, actual.dtype):
            changes.replaced.append(name)
            continue
        rounded = coarser_dtype(actual.dtype, dtype)
        found = measure_difference(name, actual.cpu(), expected, rounded)
        changes.weights += [found] if found is not None else []
    return changes
