"""Hugging Face model folders: `config.json` and weight files. Each weight is a tensor of the dump."""

from functools import partial
from pathlib import Path

from assay.dumps.protocol import DamagedFiles, Dump, DumpedTensor, DumpError
from assay.errors import UsageError
from assay.files import UnreadableFileError
from assay.models.stored_tensors import describe_stale_copies, dtype_of, map_tensor, read_pickled
from assay.models.weight_files import read_tensors
from assay.sites import CallSite, Site, unwrapped_path

_CONFIG = "config.json"
_WEIGHTS = ("model*.safetensors*", "pytorch_model*.bin*")


class ModelFolderReader:
    """Reader of all weights of a model, safetensors or pickled."""

    name = "model"

    def recognize(self, path: Path) -> bool:
        """Return True for a folder with a configuration and weights."""
        return (path / _CONFIG).is_file() and any(
            next(path.glob(pattern), None) for pattern in _WEIGHTS
        )

    def open(self, path: Path) -> Dump:
        """Read the headers of all weight files."""
        try:
            found = read_tensors(path)
            pickled = read_pickled(path) if found is None else {}
            damaged = DamagedFiles()
            damaged.problems += describe_stale_copies(path)
        except UnreadableFileError:
            raise
        except UsageError as error:
            raise DumpError(str(error)) from None
        weights = [
            DumpedTensor(
                _site_of(one.name), one.name, partial(map_tensor, one),
                dtype=dtype_of(one), shape=one.shape,
            )
            for one in found or ()
        ]  # fmt: skip
        weights += [
            DumpedTensor.of_values(_site_of(name), name, value.detach, value)
            for name, value in pickled.items()
        ]
        return Dump.of_found(self.name, path, weights, damaged)


def _site_of(weight: str) -> Site:
    module, _, name = weight.rpartition(".")
    return Site(CallSite(0, unwrapped_path(module)), f"parameter.{name}")
