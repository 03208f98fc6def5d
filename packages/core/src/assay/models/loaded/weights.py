"""Compare parameters and buffers of a loaded model with the raw values of its files."""

# ruff: noqa: ANN401 - objects of transformers

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from assay.models.loaded.differences import count_non_finite, is_cast_of, measure_difference
from assay.models.loaded.report import LoadReport, WeightDifference
from assay.models.loaded.tensor_sources import TensorSource, find_sources
from assay.progress import counted

# Buffers that older versions of transformers stored, and newer ones ignore in files
# (`_adjust_missing_and_unexpected_keys`).
_ONCE_STORED = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")


@dataclass(slots=True)
class Inspection:
    """The report on a load, and the expected tensors, to find later changes."""

    report: LoadReport
    sources: dict[str, TensorSource] = field(default_factory=dict)
    """Tensors that the files hold, by name."""
    made: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that no file holds and that the model's code must compute alike each time."""


def compare_with_files(
    model: Any, stored: Mapping[str, Tensor], dtype: torch.dtype, method: str | None = None
) -> Inspection:
    """Compare every parameter and buffer with the stored tensors that make it up.

    dtype: the dtype of the load.
    method: the method by which `stored` is quantized; None if it is not.
    """
    found = find_sources(model, stored)
    report = LoadReport(unused=_not_ignored(model, found.unused))
    result = Inspection(report)
    report.not_compared += [f"{name} ({reason})" for name, reason in found.unknown.items()]
    by_name = result.sources = {source.name: source for source in found.sources}
    held = {_identity(tensor): name for name, tensor in all_tensors(model) if name in by_name}
    may_be_missing = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    for name, tensor in counted("compares weights", [*all_tensors(model)], "tensors"):
        source = by_name.get(name) or by_name.get(tied.get(name, ""))
        if source is not None:
            _compare(result, name, tensor, source, dtype)
        elif name in found.unknown or _identity(tensor) in held:
            continue  # listed above, or compared under its other name
        elif isinstance(tensor, nn.Parameter) and not any(
            re.search(pattern, name) for pattern in may_be_missing
        ):
            report.weights.append(WeightDifference(name=name, problem="not-stored"))
            report.compared += 1
        else:
            result.made[name] = tensor.detach().cpu().clone()
    if method is not None:
        # Loading computes with stored scales in ways that only its own code knows.
        report.not_compared += [f"{one.name} (stored by {method})" for one in report.weights]
        report.compared -= len(report.weights)
        report.weights = []
    return result


def quantization_of(model: Any) -> str | None:
    """Return the method by which the files of `model` are quantized; None if they are not."""
    settings = getattr(model.config, "quantization_config", None)
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else settings.quant_method
    return str(getattr(method, "value", method))


def all_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, buffers and other tensor attributes of modules; tied ones under each name."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield f"{path}.{name}" if path else name, value


def _compare(
    result: Inspection, name: str, tensor: Tensor, source: TensorSource, dtype: torch.dtype
) -> None:
    actual = tensor.detach().cpu()
    if count := count_non_finite(actual):
        result.report.non_finite.append(f"{name} ({count:,} of {actual.numel():,} values)")
    try:
        stored = value_in_form(source, actual)
    except UnknownFormError as error:
        result.report.not_compared.append(f"{name} ({error})")
        return
    result.report.compared += 1
    if is_cast_of(actual, stored):
        return
    rounded = coarser_dtype(actual.dtype, dtype)
    difference = measure_difference(name, actual, stored.to(actual.dtype), rounded)
    if difference is not None:
        difference.values_of = _find_owner(actual, result.sources, name)
        result.report.weights.append(difference)


def _find_owner(actual: Tensor, sources: Mapping[str, TensorSource], name: str) -> str | None:
    """Find another tensor whose stored values `actual` holds, such as after exchanging two layers."""
    for other, source in sources.items():
        try:
            stored = source.make()
        except Exception:  # noqa: BLE001, S112 - operations of transformers
            continue
        if other != name and stored.shape == actual.shape and is_cast_of(actual, stored):
            return other
    return None


class UnknownFormError(ValueError):
    """Error for a stored form that cannot be converted into the one in memory."""


def value_in_form(source: TensorSource, actual: Tensor) -> Tensor:
    """Return the stored value in the shape of `actual` and in its stored dtype.

    Raises: UnknownFormError for another form, such as a quantized one or another shape.
    """
    try:
        value = source.make()
    except Exception as error:  # any: operations of transformers
        raise UnknownFormError(f"its conversion raised {type(error).__name__}: {error}") from error
    as_stored = value
    if value.shape != actual.shape and value.dim() == 2:
        value = value.t()
    same_kind = value.dtype.is_floating_point == actual.dtype.is_floating_point
    if value.shape != actual.shape or not same_kind:
        raise UnknownFormError(f"stored as {_describe(as_stored)}, in memory {_describe(actual)}")
    return value


def coarser_dtype(held: torch.dtype, run: torch.dtype) -> torch.dtype:
    """Return the coarser of two dtypes, to which the values were rounded."""
    if not held.is_floating_point:
        return held
    return max(held, run, key=lambda one: torch.finfo(one).eps)


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _identity(tensor: Tensor) -> tuple[object, ...]:
    # Empty tensors share the address 0.
    address = tensor.data_ptr() or id(tensor)
    return (address, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _not_ignored(model: Any, unused: list[str]) -> list[str]:
    """Return the unused tensors that the model's class does not declare to ignore."""
    declared = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    buffers = [name for name, _ in model.named_buffers()]
    once = [one for one in _ONCE_STORED if any(re.search(one, name) for name in buffers)]
    patterns = [*declared, *once]
    return [name for name in unused if not any(re.search(one, name) for one in patterns)]
