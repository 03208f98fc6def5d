"""Compression of logits to the stored distributions.

Shapes: B rows, N stored tokens of a row, T positions, V vocabulary, K kept ids.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from assay.generate.passes.generation_loop import timeline_of
from assay.generate.passes.passes import Side, run_forced, watched, whole_batches
from assay.hooks.module_tracer import ModuleTracer
from assay.hooks.usage import UsageWatch
from assay.inputs import Batch
from assay_expectations.observing.projections import project
from assay_expectations.records import Distributions, Observed, Signature

# Stored positions of a row if the model does not generate. Every position has read all others.
_MAX_POSITIONS = 16


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
