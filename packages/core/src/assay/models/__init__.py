"""Models by folder, hub name or micro recipe.

Importing this package does not import torch; functions that need it are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from assay.models.micro.recipes import RECIPES
from assay.models.sources import resolve_model

if TYPE_CHECKING:
    from assay.models.load import LoadedModel, count_parameters, load_model
    from assay.models.weight_files import weight_hashes

_MODULES = {
    "weight_hashes": "weight_files",
    "LoadedModel": "load",
    "load_model": "load",
    "count_parameters": "load",
}

__all__ = [
    "RECIPES", "LoadedModel", "count_parameters", "load_model", "resolve_model", "weight_hashes",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
