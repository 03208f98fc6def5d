"""The interface of a dump reader.

A reader turns the files of one tool into `DumpedTensor` addresses, and reads single tensors on demand.
Everything after it (matching, judging, reports) sees addresses only, never file names.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, Self

from torch import Tensor

from assay.errors import UsageError
from assay.files import UnreadableFileError
from assay.sites import CallSite, RowMap, Site

Statistic = Literal["max", "min", "mean", "norm", "std", "nan", "inf", "projection", "channels"]

# Of a tensor whose address a reader has yet to work out.
UNKNOWN_SITE = Site(CallSite(0, ""), "")


@dataclass(frozen=True, slots=True)
class DumpedTensor:
    """One tensor of a dump. Only its address and its key are required."""

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
    """Name of the tensor in the dump. Only the reader interprets it; messages show it."""
    order: int = 0
    """Position in the order in which the calls finished."""
    class_name: str = ""
    """Class of the module; "" if the dump does not record it."""
    dtype: str = ""
    """Name such as `bfloat16`; "" if it is known only after reading."""
    shape: tuple[int, ...] | None = None
    """Shape; None if it is known only after reading."""
    statistics: Mapping[Statistic, float] = field(default_factory=dict)
    """Statistics that the dump records; `norm` is the Euclidean norm; those of assay are
    described in `assay.recording.statistics`."""
    noise: Mapping[str, tuple[float, float, int]] = field(default_factory=dict)
    """By dtype, what a run in it had: norm of its error, norm of this tensor, number of elements."""
    has_values: bool = True
    """False if the dump holds only the statistics."""
    layout: str = ""
    """Placement over ranks, one word per dim, such as `b s[cp:zigzag] h[tp]`; "" if unknown."""
    axes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By mesh axis, such as `tp`, the place of the rank on it and the size of the axis."""
    world_rank: int | None = None
    """Rank that wrote it, where `site` numbers the ranks of a group; None if both are the same."""

    @classmethod
    def of_values(cls, site: Site, key: str, values: Tensor) -> Self:
        """Describe a tensor that has been opened."""
        dtype = str(values.dtype).removeprefix("torch.")
        return cls(site, key, dtype=dtype, shape=tuple(values.shape))

    @property
    def writer(self) -> int:
        """Return the rank that wrote it."""
        return self.site.at.rank if self.world_rank is None else self.world_rank


@dataclass(frozen=True, kw_only=True)
class Dump:
    """An opened dump."""

    format: str
    """Name of its reader."""
    path: Path
    """Folder or file that was opened."""
    tensors: Sequence[DumpedTensor]
    """Every tensor, in the order in which the calls finished."""
    read: Callable[[DumpedTensor], Tensor]
    """Read the values of one of `tensors`, on the CPU.

    Raises: UnreadableFileError, naming the file.
    """
    rows: Mapping[CallSite, RowMap] = field(default_factory=dict)
    """Prompt and position of the rows of a call, where the dump records them."""
    rounded_to: str = ""
    """Dtype to which the inputs of every module were rounded before it computed; "" for none."""
    provenance: Mapping[str, str] = field(default_factory=dict)
    """Facts on its origin, such as the version of the tool, for people."""
    url: str = ""
    """URL from which `path` was fetched; "" for a local dump."""
    problems: Sequence[str] = ()
    """Defects, such as missing files. A dump with defects can fail a comparison but never pass one."""
    is_finished: bool = False
    """True if the dump itself records that its run came to an end."""

    @property
    def name(self) -> str:
        """Name the dump as the user did."""
        return self.url or str(self.path)

    def read_intact(self, tensor: DumpedTensor) -> Tensor | None:
        """Read values that pair or align; None if the file is damaged. Their comparison names it."""
        try:
            return self.read(tensor)
        except UnreadableFileError:
            return None


class Reader(Protocol):
    """Access to one dump format."""

    @property
    def name(self) -> str:
        """Name of the format, for `--format` and messages."""

    def recognize(self, path: Path) -> bool:
        """Return True if `path`, a file or a folder, is a dump of this format. Must be cheap."""

    def open(self, path: Path) -> Dump:
        """Read the index of a recognized dump.

        Raises: UnreadableFileError or DumpError, naming file and key.
        """


class DumpError(UsageError):
    """A dump that cannot be used."""

    @classmethod
    def of_several(cls, path: Path, what: str, names: Iterable[str]) -> Self:
        """Make the error for a path that holds several of `what`, only one of which can be opened."""
        return cls(f"{path} holds several {what}; name one of them: {', '.join(names)}")
