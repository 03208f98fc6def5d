"""Provide a local Hugging Face folder for every kind of model source."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from assay.errors import MachineError, UsageError
from assay.models.micro.recipes import MicroRecipe, read_provenance
from assay.models.remote_code import RemoteCode
from assay.models.sources import ModelSource
from assay.watchdog import temporary_folder

_DESCRIPTION = ["*.json", "*.model", "*.txt", "*.jinja"]
_WEIGHTS = "*.safetensors"


@contextmanager
def local_folder(source: ModelSource, remote_code: RemoteCode) -> Iterator[Path]:
    """Provide a folder with configuration, weights and tokenizer; remove it on exit if temporary."""
    if source.kind == "folder" and source.folder is not None:
        yield source.folder
    elif source.recipe is None:
        yield _download(source.reference, remote_code)
    elif source.trained:
        yield _verified_folder(source.recipe)
    else:
        with temporary_folder("assay-micro-") as scratch:
            write_untrained(source.recipe, source.seed, scratch)
            yield scratch


@contextmanager
def weightless_folder(source: ModelSource, remote_code: RemoteCode) -> Iterator[Path]:
    """Provide a folder with configuration and tokenizer; download no weights."""
    if source.kind == "folder" or source.recipe is not None:
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

    from assay.models.micro.untrained import new_model, save_model

    model = new_model(recipe, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    save_model(model, folder)


def fetch_config(name: str) -> Path:
    """Download the configuration of hub model `name`, without its weights."""
    from huggingface_hub import hf_hub_download

    with _hub_errors(name):
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
