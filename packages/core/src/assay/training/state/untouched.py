"""Finds trained parameters without gradient in any step, of which only zeros were compared."""

import torch
from torch import Tensor, nn

from assay.training.state.parameters import named_parameters

# Parameters with this many dims are stacked: the first dim counts experts.
_STACKED = 3


class Untouched:
    """Collects the parameters over the steps of a run. Call `add` after each, with gradients in place."""

    def __init__(self) -> None:
        # By name; a flag for each expert of a stacked parameter, else a single flag.
        self._reached: dict[str, Tensor] = {}

    def add(self, model: nn.Module) -> None:
        """Take the gradients of one step."""
        for item in named_parameters(model):
            if item.tensor.requires_grad:
                reached = _reached(item.tensor)
                self._reached[item.name] = reached | self._reached.get(item.name, reached)

    @property
    def names(self) -> list[str]:
        """Parameters without gradient; stacked ones by expert: `experts.down_proj.3`."""
        return [
            name if reached.ndim == 0 else f"{name}.{index}"
            for name, reached in self._reached.items()
            for index in (~reached.reshape(-1)).nonzero()[:, 0].tolist()
        ]


def _reached(parameter: Tensor) -> Tensor:
    """Return True for a nonzero gradient, by expert for a stacked parameter."""
    stacked = parameter.ndim >= _STACKED
    if parameter.grad is None:
        return torch.zeros(parameter.shape[:1] if stacked else (), dtype=torch.bool)
    nonzero = (parameter.grad != 0).cpu()
    return nonzero.flatten(1).any(1) if stacked else nonzero.any()
