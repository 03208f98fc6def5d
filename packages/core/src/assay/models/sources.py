"""Resolve MODEL arguments without importing torch."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl

from assay.counts import LARGEST_SEED, parse_count
from assay.errors import UsageError, name_some
from assay.files import open_file
from assay.models.micro.recipes import RECIPES, MicroRecipe, find_recipe

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")
# Files that loading a model reads.
_FILE_NAME = re.compile(r".*\.(json|safetensors|jinja|model|txt)|pytorch_model.*\.bin")
_TRUTH = {"0": False, "1": True}
_MOST_FOLDERS_NAMED = 5


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The origin of a model."""

    reference: str
    """As the user wrote it."""
    kind: Literal["micro", "folder", "hub"]
    folder: Path | None = None
    """Set for kind `folder`."""
    recipe: MicroRecipe | None = None
    """Set for kind `micro`."""
    trained: bool = True
    seed: int = 0
    """Seed of untrained weights."""


def resolve_model(reference: str) -> ModelSource:
    """Resolve `micro:RECIPE[?trained=0&seed=1]`, a folder or a hub name. Raises: UsageError."""
    if reference.startswith("micro:"):
        return _resolve_recipe(reference)
    folder = Path(reference).expanduser()
    if reference and _is_folder(folder):
        _require_readable(folder)
        return ModelSource(reference, "folder", folder=folder.resolve())
    if reference and folder.exists():
        raise UsageError(f"model {reference} is a file; a folder with a config.json is needed")
    if reference.startswith((".", "~", "/")) or not _HUB_NAME.fullmatch(reference):
        raise UsageError(
            f"model {reference!r}: no such folder, and not a valid hub name;"
            f" the recipes are {', '.join(f'micro:{name}' for name in RECIPES)}"
        )
    if len(folder.parts) > 1 and folder.parent.is_dir():
        raise UsageError(f"there is no folder {folder}; {_list_folders(folder.parent)}")
    return ModelSource(reference, "hub")


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as error:
        raise UsageError(f"model {path} cannot be read: {error.strerror}") from None


def _require_readable(folder: Path) -> None:
    """Raise UsageError for a folder without configuration or with a file that cannot be opened."""
    try:
        files = sorted(path for path in folder.iterdir() if _FILE_NAME.fullmatch(path.name))
    except OSError as error:
        raise UsageError(f"model folder {folder} cannot be read: {error.strerror}") from None
    if folder / "config.json" not in files:
        raise UsageError(f"model folder {folder} has no config.json")
    for file in files:
        with open_file(file):
            pass


def require_inside(file: Path) -> Path:
    """Return the weight file `file`.

    Raises: UsageError for a link that leaves the folder, except into the blobs of a hub cache.
    """
    folder, target = file.parent.resolve(), file.resolve()
    allowed = [folder]
    if folder.parent.name == "snapshots":
        allowed.append(folder.parent.parent / "blobs")
    if not any(target.is_relative_to(one) for one in allowed):
        raise UsageError(f"{file} is a symbolic link out of its folder, to {target}; copy the file")
    return file


def _list_folders(parent: Path) -> str:
    names = sorted(
        path.name for path in parent.iterdir() if path.is_dir() and not path.name.startswith(".")
    )
    if not names:
        return f"{parent} has no folders"
    return f"{parent} has: {name_some(names, _MOST_FOLDERS_NAMED)}"


def _resolve_recipe(reference: str) -> ModelSource:
    name, _, query = reference.removeprefix("micro:").partition("?")
    recipe = find_recipe(name)
    try:
        options = dict(parse_qsl(query, strict_parsing=True, keep_blank_values=True))
    except ValueError:
        options = {} if not query else {query: ""}
    unknown = sorted(options.keys() - {"trained", "seed"})
    if unknown:
        raise UsageError(
            f"model {reference!r}: unknown option {unknown[0]!r}; known: trained=0|1, seed=N"
        )
    trained, seed = options.get("trained", "1"), options.get("seed", "0")
    if trained not in _TRUTH or not seed.isdecimal():
        raise UsageError(f"model {reference!r}: options are trained=0|1 and seed=N")
    if _TRUTH[trained] and "seed" in options:
        raise UsageError(f"model {reference!r}: a seed needs trained=0, trained weights are fixed")
    number = parse_count(f"model micro:{name}: seed", seed, 0, LARGEST_SEED)
    return ModelSource(reference, "micro", recipe=recipe, trained=_TRUTH[trained], seed=number)
