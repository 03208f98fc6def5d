"""From the tensors that a reader finds to an opened dump."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from assay.dumps.protocol import Dump, DumpedTensor
from assay.files import UnreadableFileError

# A tensor, and what reads its values: None if the dump holds only its statistics.
FoundTensor = tuple[DumpedTensor, Callable[[], Tensor] | None]


class DamagedFiles:
    """The files of a dump that are missing or unreadable. It is read without them, and cannot pass."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.first_error: UnreadableFileError | None = None

    @contextmanager
    def skipped(self) -> Iterator[None]:
        """Leave the context at the first unreadable file, and keep its error."""
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
    """Return the dump of `found`, the tensors in the order in which their calls finished.

    Raises: the first UnreadableFileError, if no tensor can be read.
    """
    damaged = damaged or DamagedFiles()
    loaders, tensors = {}, []
    for order, (tensor, load) in enumerate(found):
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
