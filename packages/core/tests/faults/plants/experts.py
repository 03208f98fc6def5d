"""Faults in mixtures of experts: `mlp.gate` routes, `mlp.experts` computes, `mlp` is between."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LAYER = 1
EXPERT = 2


def one_experts_weights_2_percent(model: Any) -> None:
    """The second projection of one expert is 2 % too large."""
    weight = _block(model).experts.down_proj
    with torch.no_grad():
        weight[EXPERT] *= 1.02


def one_expert_half_percent(model: Any) -> None:
    """The output of one expert is 0.5 % too large, by its routing weight inside of the experts."""

    def change(x: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, index, torch.where(index == EXPERT, weights * 1.005, weights)

    _change_inputs(model, change)


def gate_and_up_exchanged(model: Any) -> None:
    """The halves of the first projection are exchanged: another layout of the weights."""
    weight = _block(model).experts.gate_up_proj
    with torch.no_grad():
        weight.copy_(weight.roll(weight.shape[1] // 2, 1))


def token_dropped(model: Any) -> None:
    """An expert that is full drops every eighth of its tokens."""

    def change(x: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        number = (index == EXPERT).int().cumsum(0)
        full = (index == EXPERT) & (number % 8 == 0)
        return x, index, weights.masked_fill(full, 0)

    _change_inputs(model, change)


def weights_of_ranks_exchanged(model: Any) -> None:
    """The first expert gets the weight of the second."""
    block = _block(model)

    def forward(hidden_states: Tensor) -> Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, index = block.gate(rows)
        result: Tensor = block.experts(rows, index, weights.flip(-1))
        return result.reshape(hidden_states.shape)

    block.forward = forward


def third_best_for_second(model: Any) -> None:
    """The router's second choice is its third."""

    def choose(probabilities: Tensor, k: int) -> tuple[Tensor, Tensor]:
        values, index = probabilities.topk(k + 1, dim=-1)
        kept = [*range(k - 1), k]
        return values[:, kept], index[:, kept]

    _route(model, choose=choose)


def softmax_over_tokens(model: Any) -> None:
    """The router's softmax is over the wrong dim."""
    _route(model, normalise=lambda logits: logits.softmax(0))


def not_renormalised(model: Any) -> None:
    """The weights of the chosen experts do not add up to 1."""
    _route(model, renormalise=lambda values: values)


def routed_in_bfloat16(model: Any) -> None:
    """The router's softmax is computed in bfloat16."""
    _route(model, normalise=lambda logits: logits.bfloat16().softmax(-1).float())


def _block(model: Any) -> Any:
    return model.model.layers[LAYER].mlp


def _change_inputs(model: Any, change: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> None:
    experts = _block(model).experts
    compute = experts.forward

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        return compute(*change(hidden_states, top_k_index, top_k_weights))

    experts.forward = forward


def _choose(probabilities: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, index = probabilities.topk(k, dim=-1)
    return values, index


def _route(
    model: Any,
    normalise: Callable[[Tensor], Tensor] = lambda logits: logits.softmax(-1),
    choose: Callable[[Tensor, int], tuple[Tensor, Tensor]] = _choose,
    renormalise: Callable[[Tensor], Tensor] = lambda values: values / values.sum(-1, keepdim=True),
) -> None:
    gate = _block(model).gate

    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = torch.nn.functional.linear(rows, gate.weight)
        values, index = choose(normalise(logits.float()), gate.top_k)
        return logits, renormalise(values), index

    gate.forward = forward
