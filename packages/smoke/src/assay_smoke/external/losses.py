"""Reads the losses that a library logs in its output or in a file of JSON lines."""

import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from assay.errors import UsageError
from assay.files import UnreadableFileError, parse_json, read_bytes
from assay.foreign_text import shorten
from assay_smoke.external.library import Losses


@dataclass(frozen=True, slots=True)
class LoggedLoss:
    """A logged loss, with the step and learning rate if they are logged too."""

    step: int | None
    value: float
    learning_rate: float | None = None
    seen_at: float = field(default_factory=time.time, compare=False)
    """Time of its reading, in seconds since the epoch."""


class LossesError(UsageError):
    """A library that does not log losses as its TOML file says."""

    @classmethod
    def no_number(cls, text: object, where: str) -> "LossesError":
        """Describe a loss or step that is not a number."""
        return cls(f"{where} gives {shorten(repr(text))}, which is not a number")


class LossReader:
    """Collects losses: `take` gets every line of the output, `poll` reads the file."""

    def __init__(self, losses: Losses, file: Path | None) -> None:
        self._losses, self._file = losses, file
        self._pattern = None if losses.pattern is None else re.compile(losses.pattern)
        # Losses in a copied output belong to an earlier run.
        self._lines_read = len(_whole_lines(file))
        self.found: list[LoggedLoss] = []

    def take(self, line: str) -> None:
        """Search a line of the output for a loss."""
        if self._pattern is not None and (match := self._pattern.search(line)):
            groups = match.groupdict()
            self._add(groups["loss"], groups.get("step"), groups.get("lr"), "losses.pattern")

    def poll(self) -> None:
        """Read new lines of the file."""
        lines = _whole_lines(self._file)
        if len(lines) < self._lines_read:
            self._lines_read = 0  # the library has restarted the file
        for line in lines[self._lines_read :]:
            for values in _objects_in(line):
                if self._losses.loss in values:
                    step, rate = (
                        values.get(name) for name in (self._losses.step, self._losses.learning_rate)
                    )
                    self._add(values[self._losses.loss], step, rate, "losses.file")
        self._lines_read = len(lines)

    def _add(self, loss: object, step: object, rate: object, where: str) -> None:
        one = LoggedLoss(
            None if step is None else _step(step, f"`step` of {where}"),
            _number(loss, f"`loss` of {where}"),
            None if rate is None else _number(rate, f"the learning rate of {where}"),
        )
        # Each rank may log the loss of the step.
        repeated = one.step is not None and self.found and self.found[-1] == one
        if not repeated:
            self.found.append(one)


def _whole_lines(file: Path | None) -> list[str]:
    if file is None or not file.is_file():
        return []
    return read_bytes(file).decode(errors="replace").split("\n")[:-1]


def _objects_in(line: str) -> Iterator[Mapping[str, object]]:
    try:
        values = parse_json(line, "a line of a log")
    except UnreadableFileError:
        return
    if isinstance(values, dict):
        yield values


def _number(value: object, where: str) -> float:
    try:
        return float(str(value))
    except ValueError:
        raise LossesError.no_number(value, where) from None


def _step(value: object, where: str) -> int:
    number = _number(value, where)
    if not math.isfinite(number):
        raise LossesError.no_number(value, where)
    return int(number)
