"""The interface of a dump reader.

A reader yields the tensors in the files of one tool as `DumpedTensor`: address, rows, placement, and the
function that reads the values.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Literal, Protocol, Self

import torch
from torch import Tensor

from assay.errors import UsageError
from assay.files import UnreadableFileError
from assay.sites import CallSite, RowMap, Site

Statistic = Literal["max", "min", "mean", "norm", "std", "nan", "inf", "projection", "channels"]

# The placeholder for an address that a reader has yet to determine.
UNKNOWN_SITE = Site(CallSite(0, ""), "")


@dataclass(frozen=True, slots=True)
class DumpedTensor:
    """One tensor of a dump. Only address and key are required."""

    site: Site
    """Address. Readers use these conventions:

    - `step`: the forward pass of a generation (0 is the prefill), or the optimizer step of a training run.
    - `micro_batch`: the batch of prompts of a generation, or the micro-batch of a training step.
    - `call`: earlier calls of the same module in that pass.
    - `module`: path in the unwrapped model. Arguments of the model itself have the module "".
    - `port`: `input.0`, `input.NAME`, `output`, `output.0`, `parameter.weight`. An operation has
      `op.INDEX.NAME.output`. In phase `backward`, `output` is the gradient that arrives, `input` the
      gradient that is passed on, `parameter.weight` the gradient of a parameter.
    """
    key: str
    """Name of the tensor in the dump, for messages."""
    load: Callable[[], Tensor] | None = field(default=None, compare=False, repr=False)
    """Read the values, on the CPU. None if the dump holds only the statistics.

    Raises: UnreadableFileError, naming the file.
    """
    order: int = 0
    """Position in the order in which the calls finished."""
    class_name: str = ""
    """Class of the module; "" if the dump does not record it."""
    dtype: str = ""
    """Name such as `bfloat16`; "" if it is known only after reading."""
    shape: tuple[int, ...] | None = None
    """Shape; None if it is known only after reading."""
    statistics: Mapping[Statistic, float] = field(default_factory=dict)
    """Recorded statistics. `norm` is Euclidean; `assay.recording.recorders` describes the others."""
    noise: Mapping[str, tuple[float, float, int]] = field(default_factory=dict)
    """By dtype, the error of a run in that dtype: norm of the error, norm of this tensor, elements."""
    rows: RowMap | None = None
    """Prompt and position of each row of the call, where the dump records them."""
    layout: str = ""
    """Placement over ranks, one word per dim, such as `b s[cp:zigzag] h[tp]`; "" if unknown."""
    axes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By mesh axis, such as `tp`, the rank's index along the axis and the size of the axis."""
    world_rank: int | None = None
    """Global rank of the writer, where `site` numbers ranks within a group; None if they agree."""

    @classmethod
    def of_values(
        cls, site: Site, key: str, load: Callable[[], Tensor] | None, values: Tensor
    ) -> Self:
        """Describe a tensor whose values have been opened."""
        dtype = str(values.dtype).removeprefix("torch.")
        return cls(site, key, load, dtype=dtype, shape=tuple(values.shape))

    @property
    def has_values(self) -> bool:
        """Return False if the dump holds only the statistics."""
        return self.load is not None

    @property
    def writer(self) -> int:
        """Return the global rank of the writer."""
        return self.site.at.rank if self.world_rank is None else self.world_rank

    @property
    def size_bytes(self) -> int:
        """Return the size of the values; 0 if dtype or shape is unknown."""
        dtype = getattr(torch, self.dtype, None) if self.dtype else None
        return prod(self.shape or (0,)) * dtype.itemsize if isinstance(dtype, torch.dtype) else 0

    @property
    def described(self) -> Self:
        """Return the description without access to the values, small enough for another process."""
        return replace(self, load=None, rows=None)

    def moved(self, **changes: object) -> Self:
        """Return the tensor with changed fields of its `CallSite`."""
        at = replace(self.site.at, **changes)  # type: ignore[arg-type]  # fields of CallSite
        return replace(self, site=Site(at, self.site.port))

    def read(self) -> Tensor:
        """Read the values, on the CPU.

        Raises: UnreadableFileError, naming the file.
        """
        if self.load is None:
            raise UnreadableFileError(f"{self.key} has no values")
        return self.load()

    def read_intact(self) -> Tensor | None:
        """Read the values; None without values, or if the file is damaged.

        The comparison of the tensor reports it.
        """
        try:
            return self.load() if self.load is not None else None
        except UnreadableFileError:
            return None

    def holds_equal(self, other: "DumpedTensor") -> bool:
        """Return True if the values of both can be read and are equal."""
        value, repeated = self.read_intact(), other.read_intact()
        return value is not None and repeated is not None and torch.equal(value, repeated)


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


@dataclass(frozen=True, kw_only=True)
class Dump:
    """An opened dump."""

    format: str
    """Name of the reader."""
    path: Path
    tensors: Sequence[DumpedTensor]
    """Every tensor, in the order in which the calls finished."""
    rounded_to: str = ""
    """Dtype to which the inputs of every module were rounded; "" for none."""
    provenance: Mapping[str, str] = field(default_factory=dict)
    """Facts on the origin, such as the version of the tool, for people."""
    url: str = ""
    """URL from which `path` was fetched; "" for a local dump."""
    notes: Sequence[str] = ()
    """Guesses on the numbering of passes, batches and layers."""
    problems: Sequence[str] = ()
    """Defects, such as missing files. A dump with defects can fail but never pass."""
    is_finished: bool = False
    """True if the dump records that the run ended."""
    is_ordered: bool = True
    """False if `tensors` are ordered by name, as the dump does not record the order of the calls."""

    @classmethod
    def of_found(
        cls,
        format_name: str,
        path: Path,
        found: Iterable[DumpedTensor],
        damaged: DamagedFiles | None = None,
        provenance: Mapping[str, str] | None = None,
    ) -> Self:
        """Build a dump from `found`, in the order in which the calls finished.

        Raises: UnreadableFileError if no tensor can be read, or for a shape that no memory can hold.
        """
        damaged = damaged or DamagedFiles()
        tensors = [replace(tensor, order=order) for order, tensor in enumerate(found)]
        for tensor in tensors:
            shape = tensor.shape or ()
            if max(prod(shape), *shape, 0) > sys.maxsize:
                raise UnreadableFileError.of(path, f"{tensor.key} has an impossible shape")
        if damaged.first_error and not tensors:
            raise damaged.first_error
        return cls(
            format=format_name, path=path, tensors=tensors,
            provenance=provenance or {}, problems=damaged.problems,
        )  # fmt: skip

    @property
    def name(self) -> str:
        """Return the URL or path that the user gave."""
        return self.url or str(self.path)

    @cached_property
    def ranks(self) -> list[int]:
        """Return the ranks that hold tensors, in ascending order."""
        return sorted({tensor.site.at.rank for tensor in self.tensors})

    @cached_property
    def is_training(self) -> bool:
        """Return True if the dump holds a backward pass."""
        return any(tensor.site.at.phase == "backward" for tensor in self.tensors)


class Reader(Protocol):
    """Access to one dump format."""

    @property
    def name(self) -> str:
        """Return the name of the format, for `--format` and messages."""

    def recognize(self, path: Path) -> bool:
        """Return True if `path`, a file or a folder, is a dump of this format. Keep it cheap."""

    def open(self, path: Path) -> Dump:
        """Read the index of a recognized dump.

        Raises: UnreadableFileError or DumpError, naming file and key.
        """


class DumpError(UsageError):
    """A dump that cannot be used."""

    @classmethod
    def of_several(cls, path: Path, what: str, names: Iterable[str]) -> Self:
        """Make the error for a path that holds several of `what`."""
        return cls(f"{path} holds several {what}; name one of them: {', '.join(names)}")
