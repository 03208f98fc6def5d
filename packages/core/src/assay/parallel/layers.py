"""The decoder layers of a model, which are sharded and compiled as units."""

from torch import nn


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Find the decoder layers, by the classes that transformers names for sharding."""
    names = {
        name
        for module in model.modules()
        for name in getattr(module, "_no_split_modules", None) or ()
    }
    return [module for module in model.modules() if type(module).__name__ in names]
