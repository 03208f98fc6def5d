"""Faults in routing to experts, each beside the same code without it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LAYER = 1


def not_renormalised(model: Any) -> None:
    """torchtitan#1448: the weights of the chosen experts do not add up to 1."""
    _route(model, lambda chosen: chosen)


def renormalised(model: Any) -> None:
    """No fault."""
    _route(model, lambda chosen: chosen / chosen.sum(-1, keepdim=True))


def normalised_over_tokens(model: Any) -> None:
    """megablocks#87: of one expert for each token the axis of experts is lost, the norm is wrong."""
    _route(model, lambda chosen: (chosen[:, 0] / chosen[:, 0].norm(dim=-1))[:, None])


def normalised_over_experts(model: Any) -> None:
    """No fault."""
    _route(model, lambda chosen: chosen / chosen.norm(dim=-1, keepdim=True))


def _route(model: Any, normalise: Callable[[Tensor], Tensor]) -> None:
    gate = model.model.layers[LAYER].mlp.gate

    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = torch.nn.functional.linear(rows, gate.weight)
        wide = torch.promote_types(logits.dtype, torch.float32)
        chosen, index = logits.to(wide).softmax(-1).topk(gate.top_k, -1)
        return logits, normalise(chosen), index

    gate.forward = forward


def one_expert_always_counts_fully(model: Any) -> None:
    """minimind#858: renormalised, the one weight is always 1, and the router learns nothing."""
    _gate_of_olmoe(model, normalise=lambda chosen: chosen / chosen.sum(-1, keepdim=True))


def one_expert_counts_by_its_weight(model: Any) -> None:
    """No fault."""
    _gate_of_olmoe(model, normalise=lambda chosen: chosen)


def _gate_of_olmoe(model: Any, normalise: Callable[[Tensor], Tensor]) -> None:
    assert not model.model.layers[LAYER].mlp.gate.norm_topk_prob
    gate = model.model.layers[LAYER].mlp.gate
    _route(model, lambda chosen: normalise(chosen).to(gate.weight.dtype))
