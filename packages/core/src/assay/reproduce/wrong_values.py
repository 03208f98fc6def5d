"""A stored value that is not what it should be, as a reproduction: a weight, a moment or a setting."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from assay.dtypes import float_format
from assay.judge.value_changes import MOST_VALUES, OF_WEIGHT, ROUNDOFFS, Proof, describe_values
from assay.models.inspect.weights import all_tensors
from assay.models.stored_tensors import same_bits
from assay.models.tensor_sources import TensorSource, UnknownFormError, value_in_form
from assay.reproduce.script import Words, describe_machine, render, write_folder
from assay.sites import unwrapped_path
from assay.verdicts import Verdict

# Elements around the first difference.
_BEFORE, _AFTER = 8, 24

# What a wrong loader does to the right values `v`: tried in this order, and kept if it gives the wrong ones.
_MISTAKES = (
    "torch.zeros_like(v)", "torch.ones_like(v)", "-v", "v + 1", "v - 1",
    "v.to(torch.bfloat16).to(v.dtype)", "v.to(torch.float16).to(v.dtype)",
    "v.to(torch.float8_e4m3fn).to(v.dtype)", "v.to(torch.float8_e5m2).to(v.dtype)",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class WrongValue:
    """A tensor or setting that differs from its right value.

    Of a tensor it holds the elements around the first difference.
    """

    name: str
    when: str
    """Description of the time at which the value is wrong."""
    expected: Tensor | str
    """Elements in the dtype in which they are stored; a setting as Python code."""
    actual: Tensor | str
    dtype: torch.dtype | None = None
    """In which both are compared; None of settings."""
    first: int = 0
    """The index of the first element that is held, in the flattened tensor."""
    shape: tuple[int, ...] = ()
    num_different: int = 1
    whole: tuple[Tensor, Tensor] | None = None
    """The right tensor and the wrong one, if they have one shape."""

    @property
    def change(self) -> str:
        """Describe which rows of a weight differ, and a simple change that explains it; "" without rows."""
        if self.whole is None:
            return ""
        expected, actual = self.whole
        is_of_rows = expected.ndim > 1 and expected.is_floating_point()
        if not is_of_rows or expected.numel() > MOST_VALUES:
            return ""
        sides = actual.flatten(1).double(), expected.flatten(1).double()
        names = (str(one.dtype).removeprefix("torch.") for one in self.whole)
        unit = max(float_format(name).unit_roundoff for name in names)
        proof = Proof(ROUNDOFFS * unit, unit)
        rows = proof.find_different(*sides).tolist()
        if not rows:
            return ""
        text = f"It differs in {len(rows):,} of {len(expected):,} rows, from row {rows[0]} to row {rows[-1]}."
        return f"{text} {describe_values(*sides, proof, OF_WEIGHT)}".rstrip()

    @property
    def mistake(self) -> str | None:
        """Return code that makes the wrong values of the right ones `v`; None if none is known."""
        if not isinstance(self.expected, Tensor) or not isinstance(self.actual, Tensor):
            return None
        v, actual = self.expected.to(self.dtype), self.actual
        if v.shape != actual.shape:
            return None
        codes = [*_MISTAKES]
        if v.is_floating_point():
            largest = int(v.abs().argmax())
            codes.append(f"v * {float(actual[largest] / v[largest]):.4g}")
        return next((code for code in codes if _gives(code, v, actual)), None)


def _gives(code: str, v: Tensor, actual: Tensor) -> bool:
    try:
        return same_bits(eval(code, {"torch": torch, "v": v}), actual.to(v.dtype))  # noqa: S307 - of _MISTAKES
    except (RuntimeError, TypeError):
        return False


def compare_values(
    name: str, expected: object, actual: object, when: str, dtype: torch.dtype | None = None
) -> Iterator[WrongValue]:
    """Yield the difference of two values, if there is one.

    dtype: which the value should have; by default that of `actual`.
    """
    if actual is None and isinstance(expected, Tensor):
        actual = expected.new_empty(0)  # it is missing
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        right_text, text = (_as_literal(one) for one in (expected, actual))
        if text != right_text:
            yield WrongValue(name, when, right_text, text)
        return
    expected, actual = (one.detach().cpu().contiguous() for one in (expected, actual))
    dtype = dtype or actual.dtype
    sides_flat = [one.to(dtype).reshape(-1) for one in (expected, actual)]
    if expected.shape == actual.shape:
        bits = [one.view(torch.uint8).view(one.numel(), dtype.itemsize) for one in sides_flat]
        wrong = (bits[0] != bits[1]).any(1).nonzero()[:, 0]
        if not len(wrong):
            return
    else:
        sides_flat[1], wrong = sides_flat[1][:0], torch.arange(expected.numel())
    first = max(0, int(wrong[0]) - _BEFORE)
    part = slice(first, first + _BEFORE + _AFTER)
    right, held = (one[part].clone() for one in (expected.reshape(-1), sides_flat[1]))
    shape, whole = tuple(expected.shape), (expected, actual)
    whole_if_alike = whole if expected.shape == actual.shape else None
    yield WrongValue(name, when, right, held, dtype, first, shape, len(wrong), whole_if_alike)


def compare_states(
    expected: Mapping[str, object], actual: Mapping[str, object], when: str
) -> Iterator[WrongValue]:
    """Yield the values that differ or are missing."""
    for name, value in expected.items():
        yield from compare_values(name, value, actual.get(name), when)


def compare_weights(
    model: nn.Module,
    sources: Mapping[str, TensorSource],
    made: Mapping[str, Tensor],
    when: str,
    dtype: torch.dtype | None = None,
) -> Iterator[WrongValue]:
    """Yield parameters and buffers of `model` that differ from the files behind `sources`, or from `made`.

    made: the right values of those that no file holds.
    dtype: as of `compare_values`.
    """
    for path, tensor in all_tensors(model):
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()  # noqa: PLW2901 - a collective, before any rank goes on
        name, actual = unwrapped_path(path), tensor.detach().cpu()
        source = sources.get(name)
        try:
            expected = made.get(name) if source is None else value_in_form(source, actual)
        except UnknownFormError:
            continue
        if expected is not None and not expected.is_meta:
            expected = expected if source else expected.to(actual.dtype)
            yield from compare_values(name, expected, actual, when, dtype)


def choose(found: Iterable[WrongValue], parameter: str | None) -> WrongValue | None:
    """Return the first value that belongs to `parameter`, else the first."""

    def rank(one: WrongValue) -> tuple[bool, bool]:
        # Of moments, not the number of steps.
        return bool(parameter and parameter in one.name), math.prod(one.shape) > 1

    return max(found, key=rank, default=None)


def write(one: WrongValue, words: Words, verdict: Verdict, folder: Path) -> Path:
    """Write the four files into `folder`. Returns: reproduce.py."""
    tensors: dict[str, Tensor] = {}
    fields: dict[str, Any] = {name: getattr(one, name) for name in one.__slots__}
    fields |= words._asdict() | {
        "mistake": one.mistake,
        "change": one.change,
        "there": describe_machine(verdict),
    }
    if isinstance(one.expected, Tensor) and isinstance(one.actual, Tensor):
        tensors = {"bytes": one.expected.view(torch.uint8), "actual": one.actual}
        dtypes = (str(each).removeprefix("torch.") for each in (one.dtype, one.expected.dtype))
        fields |= dict(zip(("dtype", "stored"), dtypes, strict=True))
        fields["num_elements"] = math.prod(one.shape)
    script, readme = (render(f"wrong_value.{kind}.j2", fields) for kind in ("py", "md"))
    return write_folder(folder, verdict, one.name, tensors, script, readme)


def _as_literal(value: object) -> str:
    if isinstance(value, Tensor):
        value = f"a tensor of {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(json.loads(json.dumps(value, default=str, sort_keys=True)))
