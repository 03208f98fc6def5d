"""Compression of logits to the stored distributions, with random projections; and the errors of modules.

A projection is a sum over the vocabulary with a fixed pattern of signs. Averaged over patterns, the mean
square difference of projections equals that of the distributions. So projections detect errors of unlikely
ids, swapped ids, a wrong sign and a wrong scale. The relative error of a module's result includes the error of
its inputs.
Source: Achlioptas, Database-friendly random projections, JCSS 66 (2003).

Shapes: B rows, N stored tokens of a row, T positions, V vocabulary, K kept ids, R tokens, C channels, M projections.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from assay.generate.generation_loop import timeline_of
from assay.generate.passes import Side, run_forced, watched, whole_batches
from assay.hooks.module_tracer import ActiveCall, ModuleTracer, NullHandler
from assay.hooks.row_positions import RowIndex
from assay.hooks.tensors import iterate_tensors
from assay.hooks.usage import UsageWatch
from assay.inputs import Batch
from assay_expectations.records import Distributions, Observed, Signature

NUM_PROJECTIONS = 8

# Source: Steele, Lea, Flood, Fast splittable pseudorandom number generators, OOPSLA 2014 (SplitMix64).
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
_BITS = 64
_MASK = (1 << _BITS) - 1


# Stored positions of a row if the model does not generate. Every position has read all others.
_MAX_POSITIONS = 16


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


def forced_log_probabilities(
    side: Side,
    batches: Sequence[Batch],
    tokens: Sequence[Tensor],
    tracer: ModuleTracer | None = None,
) -> list[list[Tensor]]:
    """Return log-probabilities by batch and row, (N, V) in float64, under forced `tokens`, (B, N).

    For a model that does not generate: at a few positions of each row, never in padding.
    tracer: an attached tracer, or None.
    """
    found = []
    for work, tokens_BN in zip(whole_batches(batches), tokens, strict=True):
        if tracer is not None:
            tracer.begin_batch(work.batch.number, timeline_of(work.batch))
        logp_BTV = run_forced(side, work, tokens_BN).logits.double().log_softmax(-1)
        rows = zip(logp_BTV, work.batch.attention_mask, strict=True)
        generates = tokens_BN.shape[1] > 0
        found.append(
            [logp_TV if generates else logp_TV[_kept_positions(mask_T)] for logp_TV, mask_T in rows]
        )
    return found


def _kept_positions(mask_T: Tensor) -> Tensor:
    """Choose at most 16 evenly spaced positions outside of padding."""
    valid = mask_T.nonzero().flatten()
    places = torch.linspace(0, len(valid) - 1, min(len(valid), _MAX_POSITIONS)).round().long()
    return valid[places]


def distributions_of(
    rows: Sequence[Sequence[Tensor]], top_ids: Sequence[Sequence[Tensor]]
) -> Distributions:
    """Compress log-probabilities, by batch and row (N, V).

    top_ids: the kept ids, by batch and row (N, K).
    """
    return Distributions(
        log_probabilities=[
            [_kept(logp_NV, ids_NK).tolist() for logp_NV, ids_NK in zip(*batch, strict=True)]
            for batch in zip(rows, top_ids, strict=True)
        ],
        projections=[[project(logp_NV).tolist() for logp_NV in batch] for batch in rows],
    )


def observe(
    side: Side, batches: Sequence[Batch], signature: Signature, watch: UsageWatch
) -> Observed:
    """Run the model on the tokens of `signature`, while `watch` records its usage."""
    tokens = [
        torch.tensor(rows, dtype=torch.long).reshape(len(rows), -1) for rows in signature.tokens
    ]
    top_ids = [[torch.tensor(ids) for ids in batch] for batch in signature.top_ids]
    with watched(side, watch) as tracer:
        given = forced_log_probabilities(side, batches, tokens, tracer)
    return Observed(
        distributions=distributions_of(given, top_ids),
        most_likely=[
            [
                logp_NV.topk(ids_NK.shape[-1], dim=-1).values.tolist()
                for logp_NV, ids_NK in zip(*batch, strict=True)
            ]
            for batch in zip(given, top_ids, strict=True)
        ],
        dtype=_usual_dtype(side),
    )


def _kept(logp_NV: Tensor, ids_NK: Tensor) -> Tensor:
    """Return the log-probabilities of the ids, and last of all other ids together."""
    others_NV = logp_NV.scatter(-1, ids_NK, -torch.inf)
    return torch.cat([logp_NV.gather(-1, ids_NK), others_NV.logsumexp(-1, keepdim=True)], dim=-1)


def _usual_dtype(side: Side) -> str:
    sizes: dict[torch.dtype, int] = {}
    for parameter in side.loaded.model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    usual = max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
    return str(usual).removeprefix("torch.")


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
