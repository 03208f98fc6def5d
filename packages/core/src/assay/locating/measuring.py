"""The comparison of tensors with the reference's, and the error that accumulates without injected values."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from assay.comparing.results import PortResult
from assay.hooks.module_tracer import ActiveCall, NullHandler
from assay.hooks.row_positions import RowIndex
from assay.hooks.values.nested import iterate_tensors
from assay.kernel import sum_pair
from assay.locating.matching.packed_trace import ReplayedTrace
from assay.locating.matching.running_parts import BatchSource
from assay.sites import CallSite, RowMap


def measure(
    result: PortResult,
    index: RowIndex,
    rows: RowMap | None,
    excluded: Tensor | None,
    actual: Tensor,
    expected: Tensor,
) -> tuple[Tensor, Tensor]:
    """Add the error of `actual` to `result`. Integers and flags count as equal or different rows.

    index: addresses of the rows of the call.
    excluded: batch rows to leave out, (B,) bool.
    Shapes: actual and expected alike.
    Returns: the compared rows of both, (R, C).
    """
    actual, expected = as_real(actual), as_real(expected)
    if rows is not None and expected.shape == (rows.num_rows, rows.length):
        actual, expected = actual[..., None], expected[..., None]  # one number for each token
    (actual_RC, expected_RC), prompt, position = index.flatten(actual, expected)
    num_padding = index.num_padding(actual)
    result.num_padding += num_padding
    if excluded is not None and len(excluded) == expected.shape[0]:
        of_rows = excluded.reshape(-1, *[1] * (expected.ndim - 1)).expand(expected.shape)
        keep = ~index.flatten(of_rows)[0][0][:, 0]
        result.exact.num_near_ties += int((~keep).sum())
        actual_RC, expected_RC = actual_RC[keep], expected_RC[keep]
        prompt, position = prompt[keep], position[keep]
    if expected.is_floating_point():
        if num_padding:
            (padding,) = index.padding(actual)
            if not math.isfinite(padding.sum(dtype=torch.float64)):
                wrong = ~padding.isfinite() & index.padding(expected)[0].isfinite()
                result.num_nonfinite_padding += int(wrong.sum())
        if actual.dtype is torch.float64:
            actual_RC = actual_RC.to(expected.dtype)  # the yardstick, in the dtype of the trace
        result.sums.add_later(actual_RC, expected_RC, prompt, position)
        return actual_RC, expected_RC
    different = (actual_RC != expected_RC).any(-1)
    num_different = int(different.sum())
    result.exact.add(len(different), num_different)
    if num_different and result.exact.first == (-1, -1):
        first = int(different.nonzero()[0])
        result.exact.first = (int(prompt[first]), int(position[first]))
    return actual_RC, expected_RC


def as_real(tensor: Tensor) -> Tensor:
    """Return complex numbers as pairs of real ones along the last dim, and other tensors unchanged.

    Shapes: complex (..., C) to (..., 2 C).
    """
    if not tensor.is_complex():
        return tensor
    return torch.view_as_real(tensor.resolve_conj()).reshape(*tensor.shape[:-1], -1)


def is_broadcast_over_rows(expected: tuple[int, ...], actual: tuple[int, ...]) -> bool:
    """Return True if the reference has one row for all rows of this run, as for positions."""
    return expected[:1] == (1,) and actual[:1] > (1,) and expected[1:] == actual[1:]


@dataclass
class DriftMeter(NullHandler):
    """A handler that compares the main result of every module and changes nothing."""

    trace: ReplayedTrace
    source: BatchSource = field(default_factory=lambda: BatchSource(0))
    """The running batch in the trace. The caller sets it before each batch."""
    sums: dict[str, list[float]] = field(default_factory=dict)
    """By module, the sums of squared errors and of squared expected values."""
    _index: RowIndex = field(default_factory=lambda: RowIndex(None))

    def enter(self, active: ActiveCall) -> None:
        """Begin a root call; arguments are not compared."""
        if active.call.caller is None:
            self._index = RowIndex(None)

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - see TraceHandler
        """Compare the first floating-point result."""
        at = active.call.site
        expected = self.trace.find(
            CallSite(at.step, at.module, at.call, micro_batch=self.source.batch)
        )
        if expected is None:
            return output
        for port, tensor in iterate_tensors(output, "output"):
            if tensor.is_floating_point() and port in expected.ports:
                recorded = self.source.select(self.trace.tensor(expected, port), expected.rows)
                rows = self.source.select_rows(expected.rows)
                if self._index.rows is not rows:
                    self._index = RowIndex(rows)
                self._add(at.module, tensor, recorded)
                break
        return output

    def relative_errors(self) -> dict[str, float]:
        """Return ||actual - expected|| / ||expected|| of each module, over all its calls.

        nan where a value is not finite on one side, or another one on the other; 1 where only
        the recorded side is zero.
        """
        return {module: (dd / (ee or dd or 1.0)) ** 0.5 for module, (dd, ee) in self.sums.items()}

    def _add(self, module: str, tensor: Tensor, recorded: Tensor) -> None:
        actual = tensor.detach().cpu()
        if actual.shape != recorded.shape:
            return
        (actual_RC, expected_RC), _, _ = self._index.flatten(actual, recorded)
        found = sum_pair(actual_RC, expected_RC, "norms")
        sums = self.sums.setdefault(module, [0.0, 0.0])
        _, error, _ = found.rows  # nan in a row with a wrong value that is not finite
        sums[0] += math.nan if bool(error.isnan().any()) else found.dd
        sums[1] += found.ee
