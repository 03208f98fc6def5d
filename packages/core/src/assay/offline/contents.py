"""`assay inspect`: the contents of a dump."""

from collections import Counter
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from assay.comparing.wording.numerals import format_count
from assay.dumps.recognizing import open_dump
from assay.errors import name_some
from assay.foreign_text import one_line
from assay.offline.judging.locating import level_of
from assay.offline.ports.lanes import collect_lanes
from assay.offline.tokens.alignment import find_passes

_NUM_SHOWN = 5
# Bytes of one value of dtypes whose names do not end in their number of bits.
_BITS = {"bool": 8, "float8_e4m3fn": 8, "float8_e5m2": 8}


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a dump, for people and programs."""

    format: str
    path: str
    tensors: int
    size_bytes: int
    statistics_only: bool
    ranks: list[int]
    passes: list[str]
    modules: int
    by_level: dict[str, int]
    dtypes: dict[str, int]
    provenance: dict[str, str]
    problems: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    def to_lines(self) -> list[str]:
        """Return the text that the command prints."""
        kind = format_count(self.tensors, "tensor")
        kind += " (statistics, no values)" if self.statistics_only else ""
        lines = [
            f"{self.format} dump {self.path}",
            f"  {kind}, {self.size_bytes / 1e6:,.1f} MB, {format_count(self.modules, 'module')}",
            f"  levels: {_counts(self.by_level)}",
            f"  dtypes: {_counts(self.dtypes)}",
            f"  ranks: {', '.join(map(str, self.ranks))}",
            f"  passes ({len(self.passes)}): {name_some(self.passes, _NUM_SHOWN)}",
        ]
        lines += [f"  {name}: {value}" for name, value in self.provenance.items()]
        lines += [f"  missing: {problem}" for problem in self.problems]
        return [one_line(line) for line in lines]


def describe_contents(path: str, format_name: str | None = None) -> Contents:
    """Open a dump and count what it holds.

    Raises: DumpError or UnreadableFileError if it cannot be read.
    """
    dump = open_dump(path, format_name)
    lanes = collect_lanes(dump)
    return Contents(
        dump.format,
        str(dump.path),
        len(dump.tensors),
        sum(prod(one.shape or (0,)) * _item_bytes(one.dtype) for one in dump.tensors),
        bool(dump.tensors) and not any(one.has_values for one in dump.tensors),
        sorted({one.site.at.rank for one in dump.tensors}),
        [str(one) for one in find_passes(dump)],
        len({port.module for port in lanes}),
        dict(Counter(level_of(port) for port in lanes)),
        dict(Counter(one.dtype or "unknown" for one in dump.tensors)),
        dict(dump.provenance),
        list(dump.problems),
    )


def _item_bytes(dtype: str) -> int:
    digits = dtype.lstrip("abcdefghijklmnopqrstuvwxyz")
    return (_BITS.get(dtype) or int(digits if digits.isdigit() else 0)) // 8


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())
