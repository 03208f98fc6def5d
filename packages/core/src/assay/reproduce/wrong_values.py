"""A stored value that is not what it should be, as a reproduction: a weight, a moment or a setting."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from assay.errors import name_some
from assay.models.inspect.weights import Inspection, all_tensors, coarser_dtype, describe_change
from assay.models.stored_tensors import same_bits
from assay.reproduce.script import render, write_folder
from assay.sites import unwrapped_path
from assay.verdicts import Verdict

# The part that the folder holds: rows that differ, and columns around the first difference.
_MOST_ROWS, _BEFORE, _COLUMNS = 8, 4, 16

# What a wrong loader does to the right values `v`: tried in this order, and kept if it gives the wrong ones.
_MISTAKES = (
    "torch.zeros_like(v)", "torch.ones_like(v)", "-v", "v + 1", "v - 1",
    "v.to(torch.bfloat16).to(v.dtype)", "v.to(torch.float16).to(v.dtype)",
    "v.to(torch.float8_e4m3fn).to(v.dtype)", "v.to(torch.float8_e5m2).to(v.dtype)",
)  # fmt: skip


@dataclass(frozen=True)
class WrongValue:
    """A tensor or setting that differs from its right value."""

    name: str
    when: str
    """Description of the time at which the value is wrong."""
    expected: Any
    """A tensor in the dtype in which it is stored, or a setting as Python code."""
    actual: Any
    dtype: torch.dtype | None = None
    """In which both are compared; None of settings."""

    @cached_property
    def wrong(self) -> Tensor:
        """The elements that differ, as (R, C); of another shape, all."""
        sides = self.expected, self.actual
        if self.expected.shape != self.actual.shape:
            return torch.ones_like(_as_rows(self.expected), dtype=torch.bool)
        expected, actual = (_as_rows(one).to(self.dtype).contiguous() for one in sides)
        differ = expected.view(torch.uint8) != actual.view(torch.uint8)
        return differ.view(*expected.shape, -1).any(-1)

    @property
    def part(self) -> tuple[list[int], slice]:
        """The rows and the columns around the first difference."""
        rows = self.wrong.any(1).nonzero()[:_MOST_ROWS, 0]
        first = max(0, int(self.wrong[rows].any(0).nonzero()[0]) - _BEFORE)
        return rows.tolist(), slice(first, first + _COLUMNS)

    @property
    def where(self) -> str:
        """Name the rows that differ; "" of a single row."""
        rows, count = self.wrong.any(1).nonzero()[:, 0].tolist(), len(self.wrong)
        named = f": {name_some(list(map(str, rows)))}" if len(rows) < count else ""
        return f", in {len(rows):,} of {count:,} rows{named}" if count > 1 else ""

    @property
    def change(self) -> str:
        """Describe a factor, a transposition or another order; "" if none explains the difference."""
        actual, expected = self.actual, self.expected
        is_float = actual.is_floating_point() and expected.is_floating_point()
        if len(self.wrong) == 1 or actual.shape != expected.shape or not is_float:
            return ""
        dtype = coarser_dtype(actual.dtype, expected.dtype)
        return describe_change(_as_rows(actual), _as_rows(expected), dtype)

    @cached_property
    def mistake(self) -> str | None:
        """Return code that makes the wrong values of the right ones `v`; None if none is known."""
        expected, actual = self.expected, self.actual
        if expected.shape != actual.shape:
            return None
        v, actual = self._cut(expected.to(self.dtype)), self._cut(actual)
        order = [
            next((k for k, row in enumerate(v) if row.equal(own)), -1) for own in actual.to(v.dtype)
        ]
        codes = [*_MISTAKES, *[f"v[{order}]"] * (-1 not in order)]
        if v.is_floating_point():
            largest = int(v.abs().argmax())
            codes.append(f"v * {float(actual.flatten()[largest] / v.flatten()[largest]):.4g}")
        return next((code for code in codes if _gives(code, v, actual)), None)

    def _cut(self, tensor: Tensor) -> Tensor:
        rows, columns = self.part
        return _as_rows(tensor)[rows, columns].clone()

    @property
    def stored(self) -> dict[str, Tensor]:
        """The rows that the folder holds; none of a setting, and of another shape only the right ones."""
        if self.dtype is None:
            return {}
        is_whole = self.expected.shape == self.actual.shape
        # Compared in `dtype`, in which a rounded value may be stored in fewer bits.
        actual = self._cut(self.actual).to(self.dtype) if is_whole else self.actual[:0]
        return {"right": self._cut(self.expected), "actual": actual}

    def write(self, place: str, verdict: Verdict, folder: Path) -> Path:
        """Write the folder. Returns: reproduce.py."""
        headline = f"{self.name} is wrong {self.when}"
        fields = {"value": self, "site": self.name, "headline": headline, "place": place}
        script = render("wrong_value.py.j2", fields)
        fields["template"] = "wrong_value.md.j2"
        return write_folder(folder, verdict, self.stored, script, fields)


def _as_rows(tensor: Tensor) -> Tensor:
    """Return a tensor as (R, C): C is its last dim."""
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.ndim > 1 else tensor.reshape(1, -1)


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
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        right, held = (one.detach().cpu().contiguous() for one in (expected, actual))
        found = WrongValue(name, when, right, held, dtype or actual.dtype)
        if found.wrong.any():
            yield found
    elif (literal := _as_literal(expected)) != (wrong := _as_literal(actual)):
        yield WrongValue(name, when, literal, wrong)


def compare_states(
    expected: Mapping[str, object], actual: Mapping[str, object], when: str
) -> Iterator[WrongValue]:
    """Yield the values that differ or are missing."""
    for name, value in expected.items():
        yield from compare_values(name, value, actual.get(name), when)


def compare_weights(
    model: nn.Module, inspection: Inspection, when: str, dtype: torch.dtype | None = None
) -> Iterator[WrongValue]:
    """Yield parameters and buffers of `model` that differ from the files of `inspection`, or from what no file holds.

    dtype: as of `compare_values`.
    """
    for path, tensor in all_tensors(model):
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()  # noqa: PLW2901 - a collective, before any rank goes on
        name, actual = unwrapped_path(path), tensor.detach().cpu()
        expected = inspection.find_expected(name, actual)
        if expected is not None and not expected.is_meta:
            yield from compare_values(name, expected, actual, when, dtype)


def choose(found: Iterable[WrongValue], parameter: str | None) -> WrongValue | None:
    """Return the first value that belongs to `parameter`, else the first."""

    def rank(one: WrongValue) -> tuple[bool, bool]:
        # Of moments, not the number of steps.
        is_tensor = isinstance(one.expected, Tensor) and one.expected.numel() > 1
        return bool(parameter and parameter in one.name), is_tensor

    return max(found, key=rank, default=None)


def _as_literal(value: object) -> str:
    if isinstance(value, Tensor):
        value = f"a tensor of {value.dtype}{list(value.shape)}"
    return repr(json.loads(json.dumps(value, default=str, sort_keys=True)))
