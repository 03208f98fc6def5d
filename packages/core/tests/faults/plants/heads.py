"""Faults between the last hidden state and the logits that a model returns."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn


def fresh_head(model: Any) -> None:
    """transformers#43429: the head was not loaded, or lost its tie to the embedding."""
    old = model.lm_head.weight
    generator = torch.Generator().manual_seed(0)
    fresh = torch.randn(old.shape, generator=generator) * old.float().std().cpu()
    model.lm_head.weight = nn.Parameter(fresh.to(old))


def tie_lost(model: Any) -> None:
    """The head is a copy of the embedding, and then 1 % off."""
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 1.01)


def final_softcap_lost(model: Any) -> None:
    """Logits are not capped."""
    assert model.config.final_logit_softcapping
    model.config.final_logit_softcapping = None


def logits_1_percent(model: Any) -> None:
    """Logits are 1 % too large: a temperature."""
    _change_logits(model, lambda logits: (logits.double() * 1.01).to(logits.dtype))


def shards_exchanged(model: Any) -> None:
    """A vocabulary-parallel head gathers its halves in the wrong order."""
    head = model.lm_head
    multiply = head.forward
    head.forward = lambda input: multiply(input).roll(head.out_features // 2, -1)  # noqa: A006


def one_logit_not_a_number(model: Any) -> None:
    """One logit of one token is NaN."""

    def change(logits: Tensor) -> Tensor:
        logits = logits.clone()
        logits[0, -1, 17] = torch.nan
        return logits

    _change_logits(model, change)


def _change_logits(model: Any, change: Callable[[Tensor], Tensor]) -> None:
    run = model.forward

    @wraps(run)  # generate() reads the signature
    def forward(*args: Any, **kwargs: Any) -> Any:
        output = run(*args, **kwargs)
        output.logits = change(output.logits)
        return output

    model.forward = forward
