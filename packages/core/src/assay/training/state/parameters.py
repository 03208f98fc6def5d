"""Parameters and buffers by their names in the unwrapped model."""

from dataclasses import dataclass

from torch import Tensor, nn

from assay.sites import unwrapped_path


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """A parameter and the module that owns it."""

    name: str
    """Full name in the unwrapped model."""
    module: str
    kind: str
    tensor: nn.Parameter


def named_parameters(model: nn.Module) -> list[NamedParameter]:
    """List all parameters, each once."""
    modules = dict(model.named_modules())
    found = []
    for path, parameter in model.named_parameters():
        owner, _, name = path.rpartition(".")
        module = unwrapped_path(owner)
        full = f"{module}.{name}" if module else name
        found.append(NamedParameter(full, module, type(modules[owner]).__name__, parameter))
    return found


def untrained_values(model: nn.Module) -> dict[str, Tensor]:
    """Return buffers and frozen parameters by their names in the unwrapped model."""
    values: dict[str, Tensor] = dict(model.named_buffers())
    values |= {name: p for name, p in model.named_parameters() if not p.requires_grad}
    return {unwrapped_path(name): value for name, value in values.items()}
