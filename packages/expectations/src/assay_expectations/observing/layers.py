"""Relative error of each module's result, including the error of its inputs.

Shapes: R tokens outside of padding, C channels, M projections.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from assay.generate.passes.generation_loop import timeline_of
from assay.generate.passes.passes import Side, run_forced, whole_batches
from assay.hooks.module_tracer import ActiveCall, ModuleTracer, NullHandler
from assay.hooks.row_positions import RowIndex
from assay.hooks.values.nested import iterate_tensors
from assay.inputs import Batch
from assay_expectations.observing.distributions import project

# Significant digits of an error in the file.
_DIGITS = 5

# For each module, projections of its main result in every call, (R, M).
Sketches = Mapping[str, Sequence[Tensor]]


def sketch_layers(side: Side, batches: Sequence[Batch], tokens: Sequence[Tensor]) -> Sketches:
    """Project the results of all modules under forced `tokens`, (B, N) by batch.

    Modules are in the order in which they end first, so callees precede their callers.
    """
    sketcher = _Sketcher()
    tracer = ModuleTracer(sketcher)
    with tracer.attached(side.loaded.model):
        for work, tokens_BN in zip(whole_batches(batches), tokens, strict=True):
            tracer.begin_batch(work.batch.number, timeline_of(work.batch))
            run_forced(side, work, tokens_BN)
    return sketcher.sketches


def layer_errors(expected: Sketches, actual: Sketches) -> dict[str, float]:
    """Compute ||actual - expected|| / ||expected|| in the worst call of each module, from projections.

    The worst call, so that an error in decode is not averaged with the many tokens of prefill. Modules
    with different calls or rows on the two sides are left out.
    """
    errors = {}
    for module, calls in expected.items():
        others = actual.get(module, ())
        if [call.shape for call in calls] != [other.shape for other in others]:
            continue
        ratios = [
            float((other - call).norm() / call.norm())
            for call, other in zip(calls, others, strict=True)
            if call.norm() > 0
        ]
        if ratios:
            worst = max(ratios, key=lambda ratio: math.inf if math.isnan(ratio) else ratio)
            errors[module] = float(f"{worst:.{_DIGITS}g}")
    return errors


@dataclass
class _Sketcher(NullHandler):
    """A handler that projects the main result of every call and changes nothing."""

    sketches: dict[str, list[Tensor]] = field(default_factory=dict)
    _index: RowIndex = field(default_factory=lambda: RowIndex(None))

    def enter(self, active: ActiveCall) -> None:
        """Start a row index at each root call."""
        if active.call.caller is None:
            self._index = RowIndex(active.call.rows)

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - see TraceHandler
        """Project the first floating-point result."""
        for _, tensor in iterate_tensors(output, "output"):
            if tensor.is_floating_point():
                (values_RC,), _, _ = self._index.flatten(tensor.detach().cpu().double())
                self.sketches.setdefault(active.call.site.module, []).append(project(values_RC))
                break
        return output
