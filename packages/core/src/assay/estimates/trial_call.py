"""A call of a model without values, on torch's meta device, which gives the shape of every tensor."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from assay.estimates.speed import SECONDS_PER_MODULE_CALL, Speed
from assay.hooks.values.nested import iterate_tensors

# Few models have a dim of 61, so a (61, 61) tensor is a mask or probabilities of attention.
_TRIAL_TOKENS = 61


@dataclass(frozen=True, slots=True)
class TrialCall:
    """The sizes of a model's call."""

    num_values: float
    """Numbers at all module boundaries for each token, each tensor once, and cache entries; no logits."""
    num_multiplied: float
    """Weights by which each token is multiplied: of experts, those that it chooses."""
    num_modules: int

    @classmethod
    def of(cls, model: nn.Module) -> "TrialCall":
        """Call `model`, with parameters on the meta device."""
        seen: dict[int, Tensor] = {}
        config: Any = model.config
        # Without a padding token, transformers does not search the token ids, which have no values, for it.
        padding, config.pad_token_id = config.pad_token_id, None
        try:
            with torch.no_grad(), torch.device("meta"):
                token_ids = torch.zeros(1, _TRIAL_TOKENS, dtype=torch.long)
                with _noting_tensors(model, seen), FlopCounterMode(display=False) as operations:
                    output: Any = model(input_ids=token_ids, return_dict=True)
        finally:
            config.pad_token_id = padding
        layers = getattr(output.get("past_key_values"), "layers", None) or []
        cached = [getattr(layer, part, None) for layer in layers for part in ("keys", "values")]
        values = [*seen.values(), *(one for one in cached if isinstance(one, Tensor))]
        num_values: int = sum(one.numel() for one in values) - output["logits"].numel()
        num_multiplied = operations.get_total_flops() / 2 / _TRIAL_TOKENS
        num_modules = sum(1 for _ in model.modules())
        return cls(num_values / _TRIAL_TOKENS, num_multiplied, num_modules)

    def seconds(self, speed: Speed, num_calls: int, num_tokens: int) -> float:
        """Estimate calls that read the weights `num_calls` times, with many tokens `num_tokens` in all."""
        weights = num_calls * speed.weight + num_tokens * speed.product
        return (
            self.num_multiplied * weights + num_calls * self.num_modules * SECONDS_PER_MODULE_CALL
        )


@contextmanager
def _noting_tensors(model: nn.Module, seen: dict[int, Tensor]) -> Iterator[None]:
    """Collect the floating-point tensors that modules get and return, by identity."""

    def note(*values: object) -> None:
        for value in values:
            for _, tensor in iterate_tensors(value, ""):
                # Tables of attention are masks and probabilities, which are not stored as values.
                is_table = tensor.shape[-2:] == (_TRIAL_TOKENS, _TRIAL_TOKENS)
                if tensor.is_floating_point() and not is_table:
                    seen[id(tensor)] = tensor

    handles = [
        module.register_forward_hook(
            lambda _module, args, kwargs, output: note(args, kwargs, output), with_kwargs=True
        )
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
