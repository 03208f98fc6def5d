"""A call of a model without values, on torch's meta device, which gives the shape of every tensor."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from assay.estimates.products import Product, ProductCounter
from assay.hooks.values.nested import iterate_tensors

# Few models have a dim of 61, so a (61, 61) tensor is a mask or probabilities of attention.
_TRIAL_TOKENS = 61


@dataclass(frozen=True, slots=True)
class TrialCall:
    """A call of a model without values."""

    num_values: float
    """Numbers at all module boundaries for each token, each tensor once, and cache entries; no logits."""
    seconds: float
    """Of the call, which is the time of the model's Python."""
    products: Sequence[Product]

    @property
    def num_multiplied(self) -> int:
        """Number of weights by which each token is multiplied."""
        return sum(one.count * one.num_weights for one in self.products)

    @property
    def chooses_experts(self) -> bool:
        """True if weights are chosen for each token."""
        return any(one.is_chosen for one in self.products)

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
                with _noting_tensors(model, seen), ProductCounter(_TRIAL_TOKENS) as products:
                    output: Any = model(input_ids=token_ids, return_dict=True)
                begin = time.perf_counter()
                model(input_ids=token_ids, return_dict=True)
                seconds = time.perf_counter() - begin
        finally:
            config.pad_token_id = padding
        layers = getattr(output.get("past_key_values"), "layers", None) or []
        cached = [getattr(layer, part, None) for layer in layers for part in ("keys", "values")]
        values = [*seen.values(), *(one for one in cached if isinstance(one, Tensor))]
        num_values: int = sum(one.numel() for one in values) - output["logits"].numel()
        return cls(num_values / _TRIAL_TOKENS, seconds, products.found)


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
