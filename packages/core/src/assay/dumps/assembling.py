"""Assembly of an opened dump from the tensors that a reader finds."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path

from torch import Tensor

from assay.dumps.protocol import Dump, DumpedTensor
from assay.files import UnreadableFileError

# A tensor and its loader. The loader is None if the dump holds only statistics.
FoundTensor = tuple[DumpedTensor, Callable[[], Tensor] | None]


class DamagedFiles:
    """Missing and unreadable files of a dump. The rest is read, but the dump cannot pass."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.first_error: UnreadableFileError | None = None

    @contextmanager
    def skipped(self) -> Iterator[None]:
        """Record an unreadable file and leave the context."""
        try:
            yield
        except UnreadableFileError as error:
            self.first_error = self.first_error or error
            self.problems.append(str(error))


def assemble_dump(
    format_name: str,
    path: Path,
    found: Iterable[FoundTensor],
    damaged: DamagedFiles | None = None,
    provenance: Mapping[str, str] | None = None,
) -> Dump:
    """Build a dump from `found`, in the order in which the calls finished.

    Raises: UnreadableFileError if no tensor can be read, or for a shape that no memory can hold.
    """
    damaged = damaged or DamagedFiles()
    loaders, tensors = {}, []
    for order, (tensor, load) in enumerate(found):
        shape = tensor.shape or ()
        if max(prod(shape), *shape, 0) > sys.maxsize:
            raise UnreadableFileError.of(path, f"{tensor.key} has an impossible shape")
        loaders[tensor.key] = load
        has_values = tensor.has_values and load is not None
        tensors.append(replace(tensor, order=order, has_values=has_values))
    if damaged.first_error and not tensors:
        raise damaged.first_error

    def read(tensor: DumpedTensor) -> Tensor:
        if load := loaders[tensor.key]:
            return load()
        raise UnreadableFileError.of(path, f"{tensor.key} has no values")

    return Dump(
        format=format_name,
        path=path,
        tensors=tensors,
        read=read,
        provenance=provenance or {},
        problems=damaged.problems,
    )
