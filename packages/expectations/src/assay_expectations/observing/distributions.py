"""What is kept of a model's logits.

Shapes: B rows, N generated tokens, V vocabulary, K kept ids, M projections.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from assay.generate.passes.passes import Side, run_forced, whole_batches
from assay.inputs import Batch
from assay_expectations.observing.projections import project
from assay_expectations.records import Distributions, Observed, Signature


def forced_log_probabilities(
    side: Side, batches: Sequence[Batch], tokens: Sequence[Tensor]
) -> list[Tensor]:
    """By batch, (B, N, V) in float64, of a model that is forced to follow `tokens`, (B, N) each."""
    works = whole_batches(batches)
    return [
        run_forced(side, work, tokens_BN).logits.double().log_softmax(-1)
        for work, tokens_BN in zip(works, tokens, strict=True)
    ]


def distributions_of(batches: Sequence[Tensor], top_ids: Sequence[Tensor]) -> Distributions:
    """What is kept of log-probabilities, (B, N, V) by batch.

    top_ids: (B, N, K) by batch, the ids that are kept.
    """
    return Distributions(
        log_probabilities=[
            _kept(logp_BNV, ids_BNK).tolist()
            for logp_BNV, ids_BNK in zip(batches, top_ids, strict=True)
        ],
        projections=[project(logp_BNV).tolist() for logp_BNV in batches],
    )


def observe(side: Side, batches: Sequence[Batch], signature: Signature) -> Observed:
    """What the model gives where `signature` was captured."""
    tokens = [torch.tensor(rows) for rows in signature.tokens]
    top_ids = [torch.tensor(rows) for rows in signature.top_ids]
    given = forced_log_probabilities(side, batches, tokens)
    return Observed(
        distributions=distributions_of(given, top_ids),
        most_likely=[
            logp_BNV.topk(ids_BNK.shape[-1], dim=-1).values.tolist()
            for logp_BNV, ids_BNK in zip(given, top_ids, strict=True)
        ],
        dtype=_usual_dtype(side),
    )


def _kept(logp_BNV: Tensor, ids_BNK: Tensor) -> Tensor:
    """Of each of the ids, and last of all others together."""
    others_BNV = logp_BNV.scatter(-1, ids_BNK, -torch.inf)
    return torch.cat([logp_BNV.gather(-1, ids_BNK), others_BNV.logsumexp(-1, keepdim=True)], dim=-1)


def _usual_dtype(side: Side) -> str:
    sizes: dict[torch.dtype, int] = {}
    for parameter in side.loaded.model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    usual = max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)
    return str(usual).removeprefix("torch.")
