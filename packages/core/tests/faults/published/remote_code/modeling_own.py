"""Models that published bugs need and transformers has not: loaded with --trust-remote-code."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

# Large enough to be seen beside the gradient of the language model.
AUX_COEFFICIENT = 0.1


class AuxLossScaler(torch.autograd.Function):
    """Attaches a loss to the graph through a tensor that goes on unchanged."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return weights.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (loss,) = ctx.saved_tensors
        return gradient, torch.ones_like(loss)


class BalancingRouter(MixtralTopKRouter):
    """With a loss that balances the experts, and a count of the tokens that each was given."""

    load: Tensor
    attach: Callable[[Tensor, Tensor], Tensor]
    is_recomputed: Callable[[], bool]

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[no-untyped-call]  # of transformers
        self.register_buffer("load", torch.zeros(self.num_experts, dtype=torch.int64))
        self.attach = AuxLossScaler.apply
        # Backward is running: the call repeats one of the forward pass.
        self.is_recomputed = lambda: torch._C._current_graph_task_id() != -1

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, index = super().forward(hidden_states)  # type: ignore[no-untyped-call]
        probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        chosen = torch.nn.functional.one_hot(index, self.num_experts).sum((0, 1))
        if self.training and torch.is_grad_enabled():
            share = chosen.to(probabilities.dtype) / chosen.sum()
            loss = AUX_COEFFICIENT * self.num_experts * (share * probabilities.mean(0)).sum()
            weights = self.attach(weights, loss)
            if not self.is_recomputed():
                self.load = self.load + chosen
        return logits, weights, index


class BalancedMixtral(MixtralForCausalLM):
    """Mixtral with balancing routers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.gate = BalancingRouter(config)
        self.post_init()  # type: ignore[no-untyped-call]  # of transformers


class HalfFrozenLlama(LlamaForCausalLM):
    """Llama whose embedding is not trained."""

    def train(self, mode: bool = True) -> "HalfFrozenLlama":
        # Weights that are loaded are trained, whatever they were when the model was built.
        self.model.embed_tokens.weight.requires_grad_(requires_grad=False)
        super().train(mode)
        return self
