"""Random projections of logits, and of the inputs and results of modules.

Logits are compressed to the stored distributions by random projections: sums over the vocabulary with a fixed
pattern of signs. Averaged over patterns, the mean square difference of projections equals that of the
distributions. So projections detect errors of unlikely ids, swapped ids, a wrong sign and a wrong scale. The
relative error of a module's result includes the error of its inputs.
Source: Achlioptas, Database-friendly random projections, JCSS 66 (2003).

Shapes: B rows, N stored tokens of a row, V vocabulary, R tokens, C channels, M projections.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from assay.generate.generation_loop import timeline_of
from assay.generate.passes import Side, run_forced, whole_batches
from assay.hooks.module_tracer import ActiveCall, ModuleTracer, NullHandler
from assay.hooks.row_positions import RowIndex
from assay.hooks.tensors import TensorMap, iterate_tensors
from assay.inputs import Batch
from assay_expectations.records import value_of

NUM_PROJECTIONS = 8

# Source: Steele, Lea, Flood, Fast splittable pseudorandom number generators, OOPSLA 2014 (SplitMix64).
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
_BITS = 64
_MASK = (1 << _BITS) - 1


def project(values_RV: Tensor) -> Tensor:
    """Project each row and divide by the root of V, which preserves the average rms.

    values_RV: float64; minus infinity counts as zero, a NaN makes its row NaN. Returns: (R, M).
    """
    kept_RV = values_RV.masked_fill(values_RV == -torch.inf, 0.0)
    signs_VM = sign_patterns(values_RV.shape[-1]).to(kept_RV)
    projected: Tensor = kept_RV @ signs_VM / values_RV.shape[-1] ** 0.5
    return projected


def sign_patterns(num_ids: int) -> Tensor:
    """Return a sign for each id and projection, (V, M), from the bits of SplitMix64 at the id."""
    ids = torch.arange(1, num_ids + 1, dtype=torch.int64)
    mixed = ids * _signed(_GOLDEN_GAMMA)
    for shift, factor in _MIXERS:
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    mixed ^= _shifted(mixed, _LAST_SHIFT)
    bits_VM = (mixed[:, None] >> torch.arange(NUM_PROJECTIONS)) & 1
    return 1.0 - 2.0 * bits_VM.double()


def _shifted(values: Tensor, places: int) -> Tensor:
    """Shift to the right with zeros from the left, as for unsigned numbers."""
    return (values >> places) & ((1 << (_BITS - places)) - 1)


def _signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned number. torch multiplies modulo 2**64."""
    return value - (1 << _BITS) if value > _MASK >> 1 else value


# Significant digits of an error in the file.
_DIGITS = 5
# Of a pooled projection, which is compared to 1e-9; and the number of them for each module.
_POOLED_DIGITS = 12
_NUM_POOLED = 4

# For each module, projections of its inputs and results in every call, (R, M).
Sketches = Mapping[str, Sequence[Tensor]]


def pool_sketches(sketches: Sketches) -> dict[str, list[float]]:
    """Return the number of rows of each module, and one projection of them all: few numbers to store."""
    pooled = {}
    for module, calls in sketches.items():
        rows_RM = torch.cat(list(calls))
        signs_R = sign_patterns(len(rows_RM))[:, 0]
        numbers = (signs_R @ rows_RM)[:_NUM_POOLED].tolist()
        pooled[module] = [
            float(len(rows_RM)),
            *(float(f"{one:.{_POOLED_DIGITS}g}") for one in numbers),
        ]
    return pooled


def sketch_layers(side: Side, batches: Sequence[Batch], tokens: Sequence[Tensor]) -> Sketches:
    """Project inputs and results of all modules under forced `tokens`, (B, N) by batch.

    They are in the order in which they exist first, so callees precede the results of their callers.
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
    """A handler that projects the inputs and results of every call and changes nothing."""

    sketches: dict[str, list[Tensor]] = field(default_factory=dict)
    _index: RowIndex = field(default_factory=lambda: RowIndex(None))
    _known: TensorMap[str] = field(default_factory=TensorMap)

    def enter(self, active: ActiveCall) -> None:
        """Start a row index at each root call, and project the arguments."""
        if active.call.caller is None:
            self._index = RowIndex(active.call.rows)
        self._keep(active.call.site.module, "input", active.arguments)

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - see TraceHandler
        """Project the results."""
        self._keep(active.call.site.module, "", output)
        return output

    def _keep(self, module: str, port: str, values: object) -> None:
        """Project the first floating-point tensor, and others unless an earlier module had them."""
        tensors = [one for _, one in iterate_tensors(values, "") if one.is_floating_point()]
        for number, tensor in enumerate(tensors, 1):
            if number == 1 or self._known.get(tensor) is None:
                exact = tensor.detach().cpu().double()
                exact = exact.masked_fill(exact == torch.finfo(tensor.dtype).min, 0.0)  # of a mask
                (values_RC,), _, _ = self._index.flatten(exact)
                name = value_of(module, port, number)
                self.sketches.setdefault(name, []).append(project(values_RC))
                self._known.put(tensor, name)
