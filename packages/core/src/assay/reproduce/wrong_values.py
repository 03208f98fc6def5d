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

from assay.dtypes import float_format
from assay.errors import name_some
from assay.models.inspect.weights import Inspection, all_tensors
from assay.models.stored_tensors import same_bits
from assay.models.tensor_sources import UnknownFormError, value_in_form
from assay.reproduce.script import render, write_folder
from assay.sites import unwrapped_path
from assay.value_changes import MOST_VALUES, OF_WEIGHT, ROUNDOFFS, Proof, describe_values
from assay.verdicts import Verdict

# The part that the folder holds: rows that differ, and columns around the first difference.
_MOST_ROWS, _BEFORE, _COLUMNS = 8, 4, 16

# What a value is, by the beginning of its name.
_SUBJECTS = {
    "moments": "An optimizer state",
    "generators": "The state of a random generator",
    "state_dict": "A trainer's state",
    "trainable": "The choice of trained parameters",
    "the token ids": "A list of token ids",
}

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
    def subject(self) -> str:
        """Name what is wrong, for a title."""
        kind = "A setting" if self.dtype is None else "A weight"
        return next((it for head, it in _SUBJECTS.items() if self.name.startswith(head)), kind)

    @property
    def change(self) -> str:
        """Describe which rows of a weight differ, and a simple change that explains it; "" without rows."""
        expected, actual = self.expected, self.actual
        is_of_rows = expected.ndim > 1 and expected.is_floating_point()
        if not is_of_rows or expected.shape != actual.shape or expected.numel() > MOST_VALUES:
            return ""
        sides = actual.flatten(1).double(), expected.flatten(1).double()
        unit = max(float_format(_name(one.dtype)).unit_roundoff for one in (expected, actual))
        proof = Proof(ROUNDOFFS * unit, unit)
        rows = proof.find_different(*sides).tolist()
        if not rows:
            return ""
        where = f"{len(rows):,} of {len(expected):,} rows"
        if len(rows) < len(expected):
            where += f": {name_some(list(map(str, rows)))}"
        return f"It differs in {where}. {describe_values(*sides, proof, OF_WEIGHT)}".rstrip()

    @property
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

    def write(self, place: str, verdict: Verdict, folder: Path) -> Path:
        """Write the folder. Returns: reproduce.py."""
        tensors: dict[str, Tensor] = {}
        headline = f"{self.subject} is wrong: {self.name}"
        fields = vars(self) | {"headline": headline, "place": place, "mistake": None, "change": ""}
        if self.dtype is not None:
            is_whole = self.expected.shape == self.actual.shape
            # Compared in `dtype`, in which a rounded value may be stored in fewer bits.
            actual = self._cut(self.actual).to(self.dtype) if is_whole else self.actual[:0]
            tensors = {"right": self._cut(self.expected), "actual": actual}
            rows, columns = self.part
            fields |= {
                "mistake": self.mistake,
                "change": self.change,
                "dtype": _name(self.dtype),
                "stored": _name(self.expected.dtype),
                "shape": tuple(self.expected.shape),
                "rows": rows,
                "first": columns.start,
                "num_different": int(self.wrong.sum()),
                "num_elements": self.expected.numel(),
            }
        script = render("wrong_value.py.j2", fields)
        return write_folder(
            folder, verdict, self.name, tensors, script, "wrong_value.md.j2", fields
        )


def _as_rows(tensor: Tensor) -> Tensor:
    """Return a tensor as (R, C): C is its last dim."""
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.ndim > 1 else tensor.reshape(1, -1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
        source, expected = inspection.sources.get(name), inspection.made.get(name)
        if source is not None:
            try:
                expected = value_in_form(source, actual)
            except UnknownFormError:
                continue
        elif expected is not None:
            expected = expected.to(actual.dtype)
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
        value = f"a tensor of {_name(value.dtype)}{list(value.shape)}"
    return repr(json.loads(json.dumps(value, default=str, sort_keys=True)))
