"""Faults in projections, in an MLP and in a norm, each beside the same code without it."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

LAYER = 1
# Of the inputs of a projection, those that the shortened sum has.
NUM_SUMMED = 128


def second_half_of_buffer_not_written(model: Any) -> None:
    """pytorch#104832: a product that is to be written into a part of a buffer leaves it as it is."""
    _gate_and_up_in_one_buffer(model, (True, False))


def both_halves_of_buffer_written(model: Any) -> None:
    """No fault."""
    _gate_and_up_in_one_buffer(model, (True, True))


def decode_sums_a_part(model: Any) -> None:
    """vllm#40827: a kernel for few rows adds up a part of the sum, if it is a long one."""
    _sum_in_decode(model, NUM_SUMMED)


def decode_sums_all(model: Any) -> None:
    """No fault."""
    _sum_in_decode(model, model.model.layers[LAYER].mlp.down_proj.in_features)


def default_epsilon(model: Any) -> None:
    """Megatron-Bridge#5712: norms after a block are made without the configured epsilon."""
    _set_epsilon(model, 1e-5)


def configured_epsilon(model: Any) -> None:
    """No fault."""
    _set_epsilon(model, model.config.rms_norm_eps)


def _set_epsilon(model: Any, epsilon: float) -> None:
    norm = model.model.layers[LAYER].post_feedforward_layernorm

    def forward(x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        weight: Tensor = norm.weight
        return (normalised * (1.0 + weight.to(wide.dtype))).to(x.dtype)

    norm.forward = forward


def _gate_and_up_in_one_buffer(model: Any, written: tuple[bool, bool]) -> None:
    mlp = model.model.layers[LAYER].mlp
    gate, up = (module.weight.detach() for module in (mlp.gate_proj, mlp.up_proj))

    def forward(x: Tensor) -> Any:
        rows = x.reshape(-1, x.shape[-1])
        buffer = rows.new_zeros(2, len(rows), len(gate))
        for half, weight, is_written in zip(buffer, (gate, up), written, strict=True):
            if is_written:
                torch.mm(rows, weight.T, out=half)
        return mlp.down_proj((mlp.act_fn(buffer[0]) * buffer[1]).reshape(*x.shape[:-1], -1))

    mlp.forward = forward


def _sum_in_decode(model: Any, num_summed: int) -> None:
    projection = model.model.layers[LAYER].mlp.down_proj
    compute = projection.forward

    def forward(input: Tensor) -> Any:  # noqa: A002 - torch's name
        if input.shape[-2] > 1 or input.shape[-1] <= NUM_SUMMED:
            return compute(input)
        return linear(input[..., :num_summed], projection.weight[:, :num_summed])

    projection.forward = forward
