"""Faults of a router that chooses experts by corrected scores, in the best groups of them."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody names it
from torch import Tensor

NUM_EXPERTS, NUM_GROUPS, OPEN_GROUPS, CHOSEN = 8, 4, 2, 2


def as_it_is(model: Any) -> None:
    """The router written anew: no fault."""
    _route(model)


def correction_dropped(model: Any) -> None:
    """Experts are chosen by the scores without their correction."""
    _route(model, correction=0.0)


def groups_ignored(model: Any) -> None:
    """Experts of all groups are open to the choice."""
    _route(model, num_open=NUM_GROUPS)


def not_renormalised(model: Any) -> None:
    """The weights of the chosen experts do not add up to 1."""
    _route(model, renormalised=False)


def third_best_for_second(model: Any) -> None:
    """The second choice is the third."""
    _route(model, ranks=(0, 2))


def _route(
    model: Any,
    *,
    correction: float = 1.0,
    num_open: int = OPEN_GROUPS,
    renormalised: bool = True,
    ranks: tuple[int, ...] = (0, 1),
) -> None:
    gate = model.model.layers[1].mlp.gate

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden.reshape(-1, hidden.shape[-1]).float(), gate.weight.float())
        scores = logits.sigmoid()
        corrected = scores + correction * gate.e_score_correction_bias
        groups = corrected.unflatten(1, (NUM_GROUPS, -1)).topk(2).values.sum(-1)
        is_open = torch.zeros_like(groups, dtype=torch.bool)
        is_open.scatter_(1, groups.topk(num_open).indices, value=True)
        is_open = is_open.repeat_interleave(NUM_EXPERTS // NUM_GROUPS, 1)
        chosen = corrected.masked_fill(~is_open, -torch.inf).topk(max(ranks) + 1).indices
        chosen = chosen[:, list(ranks)]
        weights = scores.gather(1, chosen)
        if renormalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, weights * gate.routed_scaling_factor, chosen

    gate.forward = forward


def keys_of_another_text(model: Any) -> None:
    """An indexer chooses the keys of another text."""
    indexer = model.get_submodule("model.layers.0.self_attn.indexer")
    indexer.register_forward_hook(lambda _module, _args, keys: keys.roll(1, 0))
