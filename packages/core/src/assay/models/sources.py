"""Resolve MODEL arguments, and provide their folders; without importing torch."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from socket import gaierror
from typing import Literal
from urllib.parse import parse_qsl

from assay.errors import MachineError, UsageError, name_some
from assay.files import content_digest, file_digest, open_file
from assay.models.gguf_files import find_gguf, write_description
from assay.models.micro.recipes import RECIPES, MicroRecipe, find_recipe, read_provenance
from assay.option_ranges import LARGEST_SEED, parse_count
from assay.watchdog import temporary_folder

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
    kind: Literal["micro", "folder", "gguf", "hub"]
    folder: Path | None = None
    """Set for kind `folder`."""
    file: Path | None = None
    """Set for kind `gguf`."""
    recipe: MicroRecipe | None = None
    """Set for kind `micro`."""
    trained: bool = True
    seed: int = 0
    """Seed of untrained weights."""


def resolve_model(reference: str) -> ModelSource:
    """Resolve `micro:RECIPE[?trained=0&seed=1]`, a folder, a GGUF file or a hub name. Raises: UsageError."""
    if reference.startswith("micro:"):
        return _resolve_recipe(reference)
    folder = Path(reference).expanduser()
    may_be_gguf = reference and (_is_folder(folder) or folder.suffix == ".gguf")
    if may_be_gguf and (file := find_gguf(folder)) is not None:
        return ModelSource(reference, "gguf", file=file)
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
    if "/" not in reference and (near := _find_near_folder(reference)):
        raise UsageError(
            f"there is no folder {reference}; did you mean {near}? Write a model of the hub as OWNER/NAME"
        )
    return ModelSource(reference, "hub")


def require_model(reference: str) -> ModelSource:
    """Resolve a model, and fetch the configuration of one of the hub. Raises: UsageError, MachineError."""
    source = resolve_model(reference)
    if source.kind == "hub":
        fetch_config(reference)
    return source


def _find_near_folder(name: str) -> str:
    """Find a folder of a model here that a misspelled name may mean; "" without one."""
    known = [file.parent.name for file in Path().glob("*/config.json")]
    return next(iter(get_close_matches(name, known, n=1, cutoff=0.75)), "")


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


RemoteCode = Literal["refuse", "trust"]


def remote_code_of(*, trusted: bool) -> RemoteCode:
    """Convert the option --trust-remote-code."""
    return "trust" if trusted else "refuse"


def transformers_option(remote_code: RemoteCode) -> dict[str, bool]:
    """Return the argument for `from_pretrained` of every Auto class."""
    return {"trust_remote_code": remote_code == "trust"}


_DESCRIPTION = ["*.json", "*.model", "*.txt", "*.jinja"]
_WEIGHTS = "*.safetensors"


@contextmanager
def local_folder(source: ModelSource, remote_code: RemoteCode) -> Iterator[Path]:
    """Provide a folder with configuration, weights and tokenizer; remove it on exit if temporary."""
    if source.kind == "folder" and source.folder is not None:
        yield source.folder
    elif source.file is not None:
        with temporary_folder("assay-gguf-") as scratch:
            folder = scratch / source.file.name  # messages name the folder
            write_description(source.file, folder)
            yield folder
    elif source.recipe is None:
        yield _download(source.reference, remote_code)
    elif source.trained:
        yield _verified_folder(source.recipe)
    else:
        with temporary_folder("assay-micro-") as scratch:
            write_untrained(source.recipe, source.seed, scratch)
            yield scratch


def hash_files(source: ModelSource, remote_code: RemoteCode) -> str:
    """Hash the names and bytes of all files of a model."""
    with local_folder(source, remote_code) as folder:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return content_digest({str(file.relative_to(folder)): file_digest(file) for file in files})


@contextmanager
def weightless_folder(source: ModelSource, remote_code: RemoteCode) -> Iterator[Path]:
    """Provide a folder with configuration and tokenizer; download no weights."""
    if source.kind != "hub":
        with local_folder(source, remote_code) as folder:
            yield folder
    else:
        yield _download_description(source.reference, remote_code)


def _verified_folder(recipe: MicroRecipe) -> Path:
    """Return the shipped folder of a recipe. Raises: MachineError if it is absent or damaged."""
    provenance = read_provenance(recipe)
    if provenance is None:
        raise MachineError(
            f"the weights of micro:{recipe.name} are not installed ({recipe.folder});"
            f" `assay models build {recipe.name}` trains them again,"
            f" micro:{recipe.name}?trained=0 needs none"
        )
    for name, expected in provenance["sha256"].items():
        file = recipe.folder / name
        actual = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "no file"
        if actual != expected:
            raise MachineError(
                f"{file} is not the file that was shipped: sha256 {actual}, expected {expected};"
                " reinstall assay-core"
            )
    return recipe.folder


def write_untrained(recipe: MicroRecipe, seed: int, folder: Path) -> None:
    """Write a folder with random weights. Norm weights vary around their usual value."""
    import torch

    from assay.models.micro.recipes import new_model, save_model

    model = new_model(recipe, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    save_model(model, folder)


def fetch_config(name: str) -> Path:
    """Download the configuration of hub model `name`, without its weights."""
    from huggingface_hub import (
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        try_to_load_from_cache,
    )

    with _hub_errors(name):
        if try_to_load_from_cache(name, "config.json") is None:
            try:
                get_hf_file_metadata(hf_hub_url(name, "config.json"))
            except Exception as error:
                if _is_unknown_host(error):  # the download would try again for 20 seconds
                    raise ConnectionError from error
        return Path(hf_hub_download(name, "config.json")).parent


def _download(name: str, remote_code: RemoteCode) -> Path:
    from huggingface_hub import snapshot_download

    folder = _download_description(name, remote_code, _WEIGHTS)
    if not any(folder.glob(_WEIGHTS)):
        with _hub_errors(name):
            snapshot_download(name, allow_patterns=["*.bin"], ignore_patterns=["*/*"])
    return folder


def _download_description(name: str, remote_code: RemoteCode, *more: str) -> Path:
    """Download configuration, tokenizer and trusted code, and files that match `more`."""
    from huggingface_hub import snapshot_download

    patterns = [*_DESCRIPTION, *more, *(["*.py"] if remote_code == "trust" else [])]
    with _hub_errors(name):
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"]))


def _is_unknown_host(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, gaierror):
        error = error.__cause__ or error.__context__
    return error is not None


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    from huggingface_hub import errors as hub

    try:
        yield
    except (hub.LocalEntryNotFoundError, ConnectionError) as error:
        raise MachineError(
            f"model {name!r}: no such folder here, not in the local hub cache, and the hub cannot"
            f" be reached ({error.__class__.__name__})"
        ) from error
    except (hub.RepositoryNotFoundError, hub.GatedRepoError, hub.EntryNotFoundError) as error:
        raise UsageError(
            f"model {name!r}: no such folder here, and the hub raised {error.__class__.__name__}"
        ) from error
    except (hub.HfHubHTTPError, OSError) as error:
        raise MachineError(f"model {name!r} cannot be fetched from the hub: {error}") from error
