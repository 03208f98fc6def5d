"""Another layout of the same weights: fused projections of one input, and all others split in two.

A device then multiplies matrices of other sizes and must give the same output.
"""

from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.nn import functional

from assay.errors import UsageError

_NUM_TOKENS = 4


class FusedPart(nn.Module):
    """Rows `start` to `stop` of the product with fused weights."""

    def __init__(self, weight: Tensor, bias: Tensor | None, start: int, stop: int) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.start, self.stop = start, stop

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply. Shapes: inputs (..., in); returns (..., stop - start)."""
        whole = functional.linear(inputs, self.weight, self.bias)
        return whole[..., self.start : self.stop]


class TwoParts(nn.Module):
    """A projection that multiplies its weights in two parts."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply. Shapes: inputs (..., in); returns (..., out)."""
        bias: Tensor | None = self.whole.bias
        weights = self.whole.weight.chunk(2)
        biases = (None,) * len(weights) if bias is None else bias.chunk(2)
        parts = [
            functional.linear(inputs, weight, bias)
            for weight, bias in zip(weights, biases, strict=True)
        ]
        return torch.cat(parts, dim=-1)


def other_layout(model: nn.Module) -> nn.Module:
    """Replace the projections of a model, in place. A setup function.

    Raises: UsageError if there are none.
    """
    groups = list(_projections_by_input(model))
    if not groups:
        raise UsageError(f"{type(model).__name__} has no torch.nn.Linear")
    for names in groups:
        linears = [model.get_submodule(name) for name in names]
        for name, other in zip(names, _laid_out_otherwise(linears), strict=True):
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, other)
    return model


def _projections_by_input(model: nn.Module) -> Iterator[list[str]]:
    """Group the projections of each module that read the same tensor, by name."""
    seen: dict[tuple[str, int], list[str]] = {}
    kept: list[Tensor] = []  # keeps tensors alive, because ids of freed tensors are reused

    with ExitStack() as hooks:
        for name, part in model.named_modules():
            if type(part) is not nn.Linear:
                continue

            def note(_: nn.Module, inputs: tuple[Tensor, ...], name: str = name) -> None:
                kept.append(inputs[0])
                owner = name.rpartition(".")[0]
                seen.setdefault((owner, id(inputs[0])), []).append(name)

            hooks.callback(part.register_forward_pre_hook(note).remove)
        device = next(model.parameters()).device
        with torch.no_grad():
            model(input_ids=torch.arange(_NUM_TOKENS, device=device)[None])
    yield from seen.values()


def _laid_out_otherwise(linears: list[nn.Module]) -> list[nn.Module]:
    found = [linear for linear in linears if isinstance(linear, nn.Linear)]
    if len(found) == 1:
        return [TwoParts(found[0])]
    weight = torch.cat([linear.weight.detach() for linear in found])
    biases: list[Tensor | None] = [linear.bias for linear in found]
    bias = None
    if any(one is not None for one in biases):
        bias = torch.cat(
            [
                weight.new_zeros(linear.out_features) if one is None else one.detach()
                for linear, one in zip(found, biases, strict=True)
            ]
        )
    parts: list[nn.Module] = []
    start = 0
    for linear in found:
        stop = start + linear.out_features
        parts.append(FusedPart(weight, bias, start, stop))
        start = stop
    return parts
