"""Accumulated error: how far each module's result is off in an ordinary run, with inherited error."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from assay.blocks import compute_dtype
from assay.hooks.module_tracer import ActiveCall
from assay.hooks.row_positions import RowIndex
from assay.hooks.values.nested import iterate_tensors
from assay.locating.matching.batch_source import BatchSource
from assay.sites import CallSite
from assay.trace import Trace


@dataclass
class DriftMeter:
    """A handler that compares the main result of every module and changes nothing.

    source: where in the trace the running batch is found; set before each batch.
    sums: by module, of squared errors and of squared expected values.
    """

    trace: Trace
    source: BatchSource = field(default_factory=lambda: BatchSource(0))
    sums: dict[str, list[float]] = field(default_factory=dict)
    _index: RowIndex = field(default_factory=lambda: RowIndex(None))

    def enter(self, active: ActiveCall) -> None:
        """Begin a root call anew; arguments are not compared."""
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

    def finish_root(self, active: ActiveCall) -> None:
        """Keep all as it is: sums are over all root calls."""

    def relative_errors(self) -> dict[str, float]:
        """||actual - expected|| / ||expected|| of each module, over all its calls."""
        return {
            module: (dd / ee) ** 0.5 if ee > 0 else float(dd > 0)
            for module, (dd, ee) in self.sums.items()
        }

    def _add(self, module: str, tensor: Tensor, recorded: Tensor) -> None:
        actual = tensor.detach().cpu()
        if actual.shape != recorded.shape:
            return
        (actual_RC, expected_RC), _, _ = self._index.flatten(actual, recorded)
        dtype = compute_dtype(actual.dtype)
        expected = expected_RC.to(dtype)
        difference = actual_RC.to(dtype) - expected
        sums = self.sums.setdefault(module, [0.0, 0.0])
        sums[0] += float(difference.pow(2).sum())
        sums[1] += float(expected.pow(2).sum())
