"""Parameters and buffers by their names in the unwrapped model, and their elements in blocks."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from assay.sites import unwrapped_path

# Half a megabyte in float64. An intermediate result of a whole embedding exceeds the caches, and the
# operating system clears its memory: 8 M squares took 40 ms at once, and 4 ms in blocks.
_BLOCK_ELEMENTS = 1 << 16


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


def in_blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield equal parts of tensors of one shape, flattened; on accelerators one part with all elements.

    Parts of contiguous tensors share memory with them.
    """
    size = max(1, tensors[0].numel())
    if all(one.device.type == "cpu" for one in tensors):
        size = min(size, _BLOCK_ELEMENTS)
    return zip(*(one.reshape(-1).split(size) for one in tensors), strict=True)
