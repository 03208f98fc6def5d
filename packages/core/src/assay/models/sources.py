"""What a MODEL argument names, resolved without importing torch."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl

from assay.counts import LARGEST_SEED, parse_count
from assay.errors import UsageError, name_some
from assay.files import open_file
from assay.models.micro.recipes import RECIPES, Recipe, find_recipe

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")
# Files that loading a model reads.
_FILE_NAME = re.compile(r".*\.(json|safetensors|jinja|model|txt)|pytorch_model.*\.bin")
_TRUTH = {"0": False, "1": True}
# Number of folders that a message lists.
_NUM_NAMED = 5


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from, as `resolve_model` returns it.

    reference: as the user wrote it.
    folder: for kind `folder` only.
    recipe, trained, seed: for kind `micro` only; the seed is that of untrained weights.
    """

    reference: str
    kind: Literal["micro", "folder", "hub"]
    folder: Path | None = None
    recipe: Recipe | None = None
    trained: bool = True
    seed: int = 0


def resolve_model(reference: str) -> ModelSource:
    """What `reference` names: `micro:RECIPE[?trained=0&seed=1]`, a folder, or a hub name.

    Raises: UsageError if it is none of these.
    """
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
            f"model {reference!r}: no such folder, and no name that a hub could have;"
            f" the recipes are {_recipe_list()}"
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
    """Raise UsageError for a folder without configuration, or with a file that cannot be opened."""
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
    """Return `file`, a weight file of a model folder.

    Raises: UsageError for a link out of the folder, except into the blobs of a hub cache.
    """
    folder, target = file.parent.resolve(), file.resolve()
    allowed = [folder]
    if folder.parent.name == "snapshots":
        allowed.append(folder.parent.parent / "blobs")
    if not any(target.is_relative_to(one) for one in allowed):
        raise UsageError(f"{file} is a symbolic link out of its folder, to {target}; copy the file")
    return file


def _list_folders(parent: Path) -> str:
    """The folders in `parent` in words; hidden ones are left out."""
    names = sorted(
        path.name for path in parent.iterdir() if path.is_dir() and not path.name.startswith(".")
    )
    if not names:
        return f"in {parent} there are none"
    return f"in {parent} there are: {name_some(names, _NUM_NAMED)}"


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


def _recipe_list() -> str:
    return ", ".join(f"micro:{name}" for name in RECIPES)
