"""Parameters and buffers under the names of the unwrapped model."""

from dataclasses import dataclass

from torch import Tensor, nn

from assay.sites import unwrapped_path


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """A parameter by its name in the unwrapped model, and the module that owns it."""

    name: str
    module: str
    kind: str
    tensor: nn.Parameter


def named_parameters(model: nn.Module) -> list[NamedParameter]:
    """All parameters, each once, under the names of the unwrapped model."""
    modules = dict(model.named_modules())
    found = []
    for path, parameter in model.named_parameters():
        owner, _, name = path.rpartition(".")
        module = unwrapped_path(owner)
        full = f"{module}.{name}" if module else name
        found.append(NamedParameter(full, module, type(modules[owner]).__name__, parameter))
    return found


def untrained_values(model: nn.Module) -> dict[str, Tensor]:
    """Buffers and frozen parameters, under the names of the unwrapped model."""
    values: dict[str, Tensor] = dict(model.named_buffers())
    values |= {name: p for name, p in model.named_parameters() if not p.requires_grad}
    return {unwrapped_path(name): value for name, value in values.items()}
