"""Compare parameters and buffers of a loaded model with the raw values of its files."""

# ruff: noqa: ANN401 - objects of transformers

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from assay.models.inspect.report import LoadReport, WeightDifference, WeightProblem
from assay.models.stored_tensors import same_bits
from assay.models.tensor_sources import (
    TensorSource,
    UnknownFormError,
    find_sources,
    value_in_form,
)
from assay.progress import counted
from assay.value_changes import OF_WEIGHT, Proof, describe_values

# Elements that are cast at a time, to fit the caches of one core.
_CHUNK = 1 << 18
_NARROW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
# A change of a larger tensor is not described: the search takes a second for each 16 million values.
_MOST_DESCRIBED = 1 << 24


def is_cast_of(actual: Tensor, stored: Tensor) -> bool:
    """Return True if `actual` is bitwise equal to `stored`, of the same shape, after a cast.

    Casts a few megabytes at a time, into memory that is reused.
    """
    if actual.dtype == stored.dtype:
        return same_bits(actual, stored)
    flat, wanted = actual.detach().reshape(-1), stored.reshape(-1)
    return all(
        same_bits(flat[start : start + _CHUNK], wanted[start : start + _CHUNK].to(actual.dtype))
        for start in range(0, len(flat), _CHUNK)
    )


def count_non_finite(tensor: Tensor) -> int:
    """Count NaN and infinity; return 0 for a dtype of one byte, which torch cannot search."""
    if tensor.element_size() == 1 or bool(tensor.sum().isfinite()):
        return 0
    return int((~tensor.isfinite()).sum())


def measure_difference(
    name: str,
    actual: Tensor,
    expected: Tensor,
    dtype: torch.dtype,
    problem: WeightProblem = "differs",
) -> WeightDifference | None:
    """Measure how `actual` differs from `expected`; return None if the values are equal.

    Shapes: equal. Device: CPU.
    dtype: the coarser dtype to which either side was rounded. Its units in the last place measure
        the largest difference.
    """
    if same_bits(actual, expected):
        return None
    actual_rows, expected_rows = (
        one.detach().flatten(1) if one.dim() > 1 else one.detach().reshape(-1, 1)
        for one in (actual, expected)
    )
    # NaN equals NaN.
    differs = (actual_rows != expected_rows) & ~(actual_rows.isnan() & expected_rows.isnan())
    wrong = differs.any(-1).nonzero()[:, 0]
    if not len(wrong):  # zeros of different sign, NaNs of different bits
        return None
    wide = torch.complex128 if actual.is_complex() else torch.float64
    actual_wrong, expected_wrong = actual_rows[wrong].to(wide), expected_rows[wrong].to(wide)
    norm = float(expected_wrong.abs().pow(2).sum().sqrt())
    error = float((actual_wrong - expected_wrong).abs().pow(2).sum().sqrt())
    return WeightDifference(
        name=name,
        problem=problem,
        rows=(int(wrong[0]), int(wrong[-1])),
        num_differing=len(wrong),
        num_rows=len(actual_rows),
        error=error / norm if norm else (float("inf") if error else 0.0),
        largest=_largest_in_units(actual_wrong, expected_wrong, dtype),
        change=describe_change(actual_rows, expected_rows, dtype),
    )


# What a wrong loader does to all values of a weight, beside factors and other orders.
_WRONG_BY = {"rounded to " + name: getattr(torch, name) for name in _NARROW} | {
    "1 larger than the expected one": 1,
    "1 smaller than the expected one": -1,
}


def describe_change(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> str:
    """Describe a rounding, a factor, a transposition or another order; return "" if none explains the difference.

    Shapes: (R, C) both.
    """
    if not dtype.is_floating_point or actual.is_complex() or actual.numel() > _MOST_DESCRIBED:
        return ""
    for words, change in _WRONG_BY.items():
        changed = expected + change if isinstance(change, int) else expected.to(change)
        if change is not dtype and torch.equal(changed.to(dtype), actual.to(dtype)):
            return f"It is {words}."
    unit_roundoff = torch.finfo(dtype).eps / 2
    proof = Proof(unit_roundoff, unit_roundoff)
    return describe_values(actual.double(), expected.double(), proof, OF_WEIGHT)


def _largest_in_units(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """Return the largest difference of two elements, in units in the last place of `dtype`.

    Rounding a number to `dtype` in two ways (to nearest, truncated, through another dtype) results in
    neighbors at most, so two values one unit apart may stem from the same number. The unit is that of
    the larger value, so that neighbors across a power of two are one unit apart too.
    Source: Higham, Accuracy and Stability of Numerical Algorithms, 2.1 (spacing of floating-point
    numbers: between u and 2u relative, u the unit roundoff; constant below the smallest normal number).
    """
    difference = (actual - expected).abs()
    if not dtype.is_floating_point:
        return float("inf") if bool(difference.any()) else 0.0
    if not bool(difference.isfinite().all()):
        return float("inf")
    facts = torch.finfo(dtype)
    larger = torch.maximum(actual.abs(), expected.abs()).clamp(min=facts.smallest_normal)
    # frexp: larger = m * 2**e with 1/2 <= m < 1, so the last place is eps * 2**(e - 1).
    unit = torch.ldexp(torch.full_like(larger, facts.eps), larger.frexp().exponent - 1)
    return float((difference / unit).max())


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
    quantized: frozenset[str] = frozenset()
    """Paths of quantized modules, whose parameters have the form of a library."""

    def is_quantized(self, name: str) -> bool:
        """Return True for a tensor of a quantized module, except its bias."""
        module, _, kind = name.rpartition(".")
        return module in self.quantized and kind != "bias"

    def find_expected(self, name: str, actual: Tensor) -> Tensor | None:
        """Return the value in the files, else the one that no file holds; None in an unknown form."""
        source = self.sources.get(name)
        try:
            return self.made.get(name) if source is None else value_in_form(source, actual)
        except UnknownFormError:
            return None


def compare_with_files(
    model: Any,
    stored: Mapping[str, Tensor],
    dtype: torch.dtype,
    method: str | None = None,
    quantized: frozenset[str] = frozenset(),
) -> Inspection:
    """Compare every parameter and buffer with the stored tensors that make it up.

    dtype: the dtype of the load.
    method: name of an unknown method that quantized `stored`; None for a known one or floats.
    quantized: paths of modules that are compared by other means.
    """
    found = find_sources(model, stored)
    report = LoadReport(unused=_not_ignored(model, found.unused))
    result = Inspection(report, quantized=quantized)
    report.not_compared += [f"{name} ({reason})" for name, reason in found.unknown.items()]
    by_name = result.sources = {source.name: source for source in found.sources}
    held = {_identity(tensor): name for name, tensor in all_tensors(model) if name in by_name}
    may_be_missing = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    for name, tensor in counted("compares weights", [*all_tensors(model)], "tensors"):
        if result.is_quantized(name):
            continue
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
        elif tensor.is_meta:
            report.not_compared.append(f"{name} (left without values by transformers)")
        else:
            result.made[name] = tensor.detach().cpu().clone()
    if method is not None:
        # Loading computes with stored scales in ways that only its own code knows.
        report.not_compared += [f"{one.name} (stored by {method})" for one in report.weights]
        report.compared -= len(report.weights)
        report.weights = []
    return result


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


def coarser_dtype(held: torch.dtype, run: torch.dtype) -> torch.dtype:
    """Return the coarser of two dtypes, to which the values were rounded."""
    if not held.is_floating_point:
        return held
    return max(held, run, key=lambda one: torch.finfo(one).eps)


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
