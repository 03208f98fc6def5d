"""The contents of a dump, and signs that it does not hold a whole run: a cut-off end, lost ranks, reused buffers."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from assay.comparison.pairing.passes import find_passes
from assay.comparison.pairing.port_series import collect_series
from assay.dumps.protocol import Dump
from assay.dumps.recognizing import open_dump
from assay.errors import name_some
from assay.files import UnreadableFileError
from assay.foreign_text import one_line
from assay.judge.wording import format_count
from assay.progress import subtask

_NUM_SHOWN = 5


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
    damaged: list[str]
    """Errors of the files that cannot be read."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    def to_lines(self) -> list[str]:
        """Return the lines that the command prints."""
        kind = format_count(self.tensors, "tensor")
        kind += " (statistics, no values)" if self.statistics_only else ""
        lines = [
            f"{self.format} dump {self.path}",
            f"  {kind}, {self.size_bytes / 1e6:,.1f} MB, {format_count(self.modules, 'module')}",
            f"  levels: {_counts(self.by_level)}",
            f"  dtypes: {_counts(self.dtypes)}",
        ]
        if self.passes:  # a folder of weights has none
            lines += [
                f"  ranks: {', '.join(map(str, self.ranks))}",
                f"  passes ({len(self.passes)}): {name_some(self.passes, _NUM_SHOWN)}",
            ]
        lines += [f"  {name}: {value}" for name, value in self.provenance.items()]
        lines += [f"  missing: {problem}" for problem in self.problems]
        lines += [f"  damaged: {problem}" for problem in self.damaged]
        return [one_line(line) for line in lines]


def describe_contents(path: str, format_name: str | None = None) -> Contents:
    """Open a dump, count its contents, and read every tensor once.

    Raises: DumpError or UnreadableFileError if it cannot be opened.
    """
    dump = open_dump(path, format_name)
    series_of = collect_series(dump)
    return Contents(
        dump.format,
        dump.name,
        len(dump.tensors),
        sum(one.size_bytes for one in dump.tensors),
        bool(dump.tensors) and not any(one.has_values for one in dump.tensors),
        dump.ranks,
        [str(one) for one in find_passes(dump)],
        len({port.module for port in series_of}),
        dict(Counter(port.level for port in series_of)),
        dict(Counter(one.dtype or "unknown" for one in dump.tensors)),
        dict(dump.provenance),
        list(dump.problems),
        _find_damaged(dump),
    )


def _find_damaged(dump: Dump) -> list[str]:
    errors: dict[str, None] = {}
    stored = [one for one in dump.tensors if one.has_values]
    with subtask(f"reads {dump.name}", sum(one.size_bytes for one in stored), "bytes") as task:
        for tensor in stored:
            try:
                tensor.read()
            except UnreadableFileError as error:
                errors[str(error)] = None
            task.advance(tensor.size_bytes)
    return list(errors)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())
