"""Faults in root-mean-square norms."""

from typing import Any

import torch
from torch import Tensor

LAYER = 1


def root_in_bfloat16(model: Any) -> None:
    """transformers#29402: the reciprocal root is rounded to bfloat16."""

    def normalise(x: Tensor, epsilon: float) -> Tensor:
        mean = x.pow(2).mean(-1, keepdim=True) + epsilon
        return x * mean.bfloat16().rsqrt().to(x.dtype)

    _replace(_norm(model), normalise)


def epsilon_ten_times(model: Any) -> None:
    """Epsilon is 1e-5 where 1e-6 is right, or 1e-4 where 1e-5 is: another default."""
    norm = _norm(model)
    name = "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"
    setattr(norm, name, 10 * getattr(norm, name))


def epsilon_outside_of_the_root(model: Any) -> None:
    """1e-3 is added to the root instead of 1e-6 below it."""
    _replace(_norm(model), lambda x, _: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-3))


def mean_subtracted(model: Any) -> None:
    """A layer norm instead of a root-mean-square norm."""

    def normalise(x: Tensor, epsilon: float) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)

    _replace(_norm(model), normalise)


def last_channel_not_counted(model: Any) -> None:
    """The mean square leaves out the last channel."""

    def normalise(x: Tensor, epsilon: float) -> Tensor:
        return x * torch.rsqrt(x[..., :-1].pow(2).mean(-1, keepdim=True) + epsilon)

    _replace(_norm(model), normalise)


def unit_offset_lost(model: Any) -> None:
    """The weight is multiplied as it is, where 1 has to be added."""
    norm = _norm(model)
    norm.forward = lambda x: (norm._norm(x.float()) * norm.weight.float()).type_as(x)


def weights_lost(model: Any) -> None:
    """A weight was not loaded: it is what a new model has."""
    norm = _norm(model)
    fresh = torch.zeros_like if hasattr(norm, "_norm") else torch.ones_like
    assert not torch.equal(norm.weight, fresh(norm.weight))
    with torch.no_grad():
        norm.weight.copy_(fresh(norm.weight))


def final_norm_skipped(model: Any) -> None:
    """The last norm returns its input."""
    model.model.norm.forward = lambda hidden_states: hidden_states.clone()


def _norm(model: Any) -> Any:
    return model.model.layers[LAYER].input_layernorm


def _replace(norm: Any, normalise: Any) -> None:
    adds_one = hasattr(norm, "_norm")
    epsilon = norm.eps if adds_one else norm.variance_epsilon

    def forward(hidden_states: Tensor) -> Any:
        normalised = normalise(hidden_states.float(), epsilon)
        if adds_one:
            return (normalised * (1.0 + norm.weight.float())).type_as(hidden_states)
        return norm.weight * normalised.to(hidden_states.dtype)

    norm.forward = forward
