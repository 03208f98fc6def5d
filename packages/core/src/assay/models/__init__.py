"""Models by folder, hub name or micro recipe.

Importing this package imports no torch: what needs torch is loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from assay.models.micro import RECIPES, Recipe
from assay.models.sources import ModelSource, resolve_model

if TYPE_CHECKING:
    from assay.models.building import build_model
    from assay.models.hashing import combine_hashes, weight_hashes
    from assay.models.loading import LoadedModel, load_model
    from assay.models.size import ModelSize, estimate_size

_HOMES = {
    "build_model": "building",
    "combine_hashes": "hashing",
    "weight_hashes": "hashing",
    "LoadedModel": "loading",
    "load_model": "loading",
    "ModelSize": "size",
    "estimate_size": "size",
}

__all__ = [
    "RECIPES",
    "LoadedModel",
    "ModelSize",
    "ModelSource",
    "Recipe",
    "build_model",
    "combine_hashes",
    "estimate_size",
    "load_model",
    "resolve_model",
    "weight_hashes",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
