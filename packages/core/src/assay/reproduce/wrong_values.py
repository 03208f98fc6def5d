"""A stored value that is not what it should be, as a reproduction: a weight, a moment or a setting.

A setting is compared by the numbers in it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from assay.judge.loaded import describe_weight
from assay.models.inspect.weights import Inspection, all_tensors, measure_difference
from assay.reproduce.script import render, write_folder
from assay.sites import unwrapped_path
from assay.verdicts import Verdict

# The part that the folder holds: rows that differ, and columns around the first difference.
_MOST_ROWS, _BEFORE, _COLUMNS = 8, 4, 16


@dataclass(frozen=True)
class WrongValue:
    """A tensor that differs from its right value."""

    name: str
    when: str
    """Description of the time at which the value is wrong."""
    expected: Tensor
    actual: Tensor
    """Empty if the value is missing."""
    dtype: torch.dtype
    """In which both are compared."""

    @cached_property
    def wrong(self) -> Tensor:
        """The elements that differ, as (R, C); of another shape, all."""
        sides = self.expected, self.actual
        if self.expected.shape != self.actual.shape:
            return torch.ones_like(_as_rows(self.expected), dtype=torch.bool)
        expected, actual = (_as_rows(one).to(self.dtype).contiguous() for one in sides)
        differ = expected.view(torch.uint8) != actual.view(torch.uint8)
        return differ.view(*expected.shape, expected.element_size()).any(-1)

    @property
    def part(self) -> tuple[list[int], slice]:
        """The rows and the columns around the first difference."""
        rows = self.wrong.any(1).nonzero()[:_MOST_ROWS, 0]
        first = max(0, int(self.wrong[rows].any(0).nonzero()[0]) - _BEFORE)
        return rows.tolist(), slice(first, first + _COLUMNS)

    @property
    def description(self) -> str:
        """Name the rows that differ, and a factor, a transposition or another order that explains the difference."""
        if self.expected.shape != self.actual.shape:
            return f"{self.name} is missing, or has another shape, {self.when}"
        actual, expected = (one.to(self.dtype) for one in (self.actual, self.expected))
        # None if only the signs of zeros or the bits of NaN differ.
        found = measure_difference(self.name, actual, expected, self.dtype)
        fault = f"is wrong {self.when}"
        return describe_weight(found, fault) if found else f"{self.name} {fault}"

    def _cut(self, tensor: Tensor) -> Tensor:
        rows, columns = self.part
        return _as_rows(tensor)[rows, columns].clone()

    @property
    def stored(self) -> dict[str, Tensor]:
        """The rows that the folder holds; of another shape only the right ones."""
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


def numbers_of(value: object) -> Tensor:
    """Return a tensor on the host, or the numbers in a setting; empty without any."""
    if isinstance(value, Tensor):
        return value.detach().cpu().contiguous()
    numbers = [one for one in tree_leaves(value) if isinstance(one, int | float)]
    return torch.tensor(numbers, dtype=torch.float64)


def compare_values(
    name: str, expected: object, actual: object, when: str, dtype: torch.dtype | None = None
) -> Iterator[WrongValue]:
    """Yield the difference of two values, if there is one.

    dtype: which the value should have; by default that of `actual`.
    """
    right, held = numbers_of(expected), numbers_of(actual)
    found = WrongValue(name, when, right, held, dtype or held.dtype)
    if found.wrong.any():
        yield found


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
        return bool(parameter and parameter in one.name), one.expected.numel() > 1

    return max(found, key=rank, default=None)
