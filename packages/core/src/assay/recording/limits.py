"""The passes and modules that a capture records: its filter, its limits on cost, and its switch."""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, get_args

from assay.errors import UsageError
from assay.files import Url
from assay.sites import CallSite

_RANGE = re.compile(r"(\d{1,18})(:(\d{0,18}))?")
_ENDLESS = 1 << 62


@dataclass(frozen=True, slots=True)
class Ranges:
    """Numbers from 0, such as `0,100:102`: 0, 100 and 101."""

    spans: tuple[range, ...]

    @classmethod
    def parse(cls, text: str) -> "Ranges":
        """Parse numbers and half-open ranges. The end of a range may be left out.

        Raises: UsageError.
        """
        spans = []
        for word in text.split(","):
            found = _RANGE.fullmatch(word.strip())
            if found is None:
                raise UsageError(f"{text[:40]!r} is not a list of ranges such as 0,100:102")
            first = int(found[1])
            end = first + 1 if found[2] is None else int(found[3]) if found[3] else _ENDLESS
            if end <= first:
                raise UsageError(
                    f"{word.strip()!r} is empty: a range ends before its second number"
                )
            spans.append(range(first, end))
        return cls(tuple(spans))

    def __contains__(self, number: int) -> bool:
        return any(number in span for span in self.spans)


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Passes to ignore: the first ones, or those whose first tensor has a shape."""

    num_passes: int = 0
    shape: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, text: str) -> "WarmUp":
        """Parse a number of passes, or a shape such as `8x512`.

        Raises: UsageError.
        """
        words = text.lower().split("x")
        if not all(word.isdecimal() and len(word) < 10 for word in words):
            raise UsageError(
                f"warmup={text[:40]!r} is neither a number of passes nor a shape such as 8x512"
            )
        numbers = tuple(map(int, words))
        return cls(numbers[0]) if len(numbers) == 1 else cls(shape=numbers)

    def has_pass(self, number: int, shape: tuple[int, ...] | None) -> bool:
        """Return True for a warm-up pass. number: among all passes, from 0."""
        return number < self.num_passes or (shape is not None and shape == self.shape)


@dataclass(frozen=True, slots=True)
class CaptureFilter:
    """Selects the calls to record."""

    include: Sequence[str] = ("*",)
    """Globs of module paths. The model itself has the path ""."""
    exclude: Sequence[str] = ()
    steps: Ranges | None = None
    """Optimizer steps, or forward passes of a run without an optimizer. None for all."""
    tokens: Ranges | None = None
    """Forward passes, counted from 0 for each prefill. None for all."""
    warmup: WarmUp = WarmUp()
    """Passes that are not counted."""

    @classmethod
    def parse(
        cls,
        *,
        include: str | Sequence[str] = ("*",),
        exclude: str | Sequence[str] = (),
        steps: object = None,
        tokens: object = None,
        warmup: object = None,
    ) -> "CaptureFilter":
        """Parse the options of a capture. Raises: UsageError."""
        return cls(
            (include,) if isinstance(include, str) else include,
            (exclude,) if isinstance(exclude, str) else exclude,
            None if steps is None else Ranges.parse(str(steps)),
            None if tokens is None else Ranges.parse(str(tokens)),
            WarmUp() if warmup is None else WarmUp.parse(str(warmup)),
        )

    def has_module(self, path: str) -> bool:
        """Return True if the calls of a module are recorded."""
        return any(fnmatchcase(path, glob) for glob in self.include) and not any(
            fnmatchcase(path, glob) for glob in self.exclude
        )

    def has_pass(self, site: CallSite, token: int) -> bool:
        """Return True if a forward pass is recorded. token: its number since the last prefill."""
        return (self.steps is None or site.step in self.steps) and (
            self.tokens is None or token in self.tokens
        )


Grade = Literal["everything", "outputs", "statistics", "nothing"]
_GRADES: tuple[Grade, ...] = get_args(Grade)

# A grade ends before the pass that would exceed this share of a limit.
_SHARES: Mapping[Grade, float] = {"everything": 0.5, "outputs": 0.9, "statistics": 1.0}

# Left free on a disk for other programs.
_FREE_BYTES = 256 << 20

_QUANTITY = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)\s*([a-z]*)")
_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SECONDS = {"s": 1, "m": 60, "h": 3600}


def parse_size(text: str) -> int:
    """Return a number of bytes, such as 20G. Raises: UsageError."""
    units = _BYTES | {f"{unit}b": size for unit, size in _BYTES.items()}
    if not (size := int(_parse_quantity(text, units))):
        raise UsageError(f"{text[:40]!r} is not a size such as 500M or 20G")
    return size


def parse_time(text: str) -> float:
    """Return a number of seconds, such as 300 for 5m. Raises: UsageError."""
    if not (seconds := _parse_quantity(text, _SECONDS)):
        raise UsageError(f"{text[:40]!r} is not a time such as 90s, 5m or 1h")
    return seconds


def _parse_quantity(text: str, units: Mapping[str, int]) -> float:
    """Return a number times its unit; 0 for other text."""
    found = _QUANTITY.fullmatch(text.strip().lower())
    return float(found[1]) * units.get(found[2], 0) if found else 0.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes written, and seconds for which the run waited."""

    num_bytes: int = 0
    seconds: float = 0.0

    def __sub__(self, other: "Cost") -> "Cost":
        return Cost(self.num_bytes - other.num_bytes, self.seconds - other.seconds)

    def __str__(self) -> str:
        return f"{self.num_bytes / 1e6:,.1f} MB and {self.seconds:.2f} s"


@dataclass
class Budget:
    """Limits of a whole capture, and the grade of its next pass."""

    folder: Path | Url
    max_bytes: int | None
    max_seconds: float | None
    grade: Grade
    _before: Cost = Cost()
    _measured: Grade = "nothing"

    def lower_grade(self, spent: Cost) -> str | None:
        """Choose the grade of the next pass, assuming the cost of the last one of that grade.

        spent: by all passes so far.
        Returns: the reason for a lower grade; None if the grade stays.
        """
        last = spent - self._before if self._measured == self.grade else Cost()
        before, reason = self.grade, None
        while self.grade != "nothing" and (exceeded := self._find_exceeded(spent, last)):
            self.grade = _GRADES[_GRADES.index(self.grade) + 1]
            reason, last = exceeded, Cost()
        self._before, self._measured = spent, self.grade
        return f"{self.grade} instead of {before}: {reason}" if reason else None

    def _find_exceeded(self, spent: Cost, last: Cost) -> str | None:
        share = _SHARES[self.grade]
        if self.max_bytes and spent.num_bytes + last.num_bytes > share * self.max_bytes:
            return f"a pass more is over {share:.0%} of {self.max_bytes / 1e6:,.0f} MB"
        if self.max_seconds and spent.seconds + last.seconds > share * self.max_seconds:
            return f"a pass more is over {share:.0%} of {self.max_seconds:g} s"
        if isinstance(self.folder, Path):
            try:
                free = shutil.disk_usage(self.folder).free - _FREE_BYTES
            except OSError as error:
                return f"{self.folder}: {error.strerror}"
            if last.num_bytes > free or free < 0:
                return f"the disk of {self.folder} is nearly full"
        return None


_MAX_BYTES = 10_000


@dataclass
class Control:
    """A JSON file, read again when it changes: {"capture": false, "tokens": "0:16"}.

    Without a file, the capture is on.
    """

    path: Path | None
    """None for a capture that nothing changes."""
    is_on: bool = field(default=True, init=False)
    tokens: Ranges | None = field(default=None, init=False)
    """None for the ranges of the capture."""
    _known: tuple[int, int] | None = field(default=None, init=False)

    def poll(self) -> str | None:
        """Read the file before a pass. An invalid one changes nothing, and is returned as an error."""
        if self.path is None:
            return None
        try:
            found = self.path.stat()
            stamp = found.st_mtime_ns, found.st_size
            if stamp == self._known:
                return None
            self._known = stamp
            with self.path.open(encoding="utf-8") as file:
                self.is_on, self.tokens = _parse_control(file.read(_MAX_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, UsageError) as error:
            return f"{self.path}: ignored, since {error}"
        return None


def _parse_control(text: str) -> tuple[bool, Ranges | None]:
    try:
        wanted = json.loads(text)
    except (ValueError, RecursionError):
        wanted = None
    if not isinstance(wanted, dict) or not wanted.keys() <= {"capture", "tokens"}:
        raise UsageError('it is not like {"capture": true, "tokens": "0:16"}')
    is_on, tokens = wanted.get("capture", True), wanted.get("tokens")
    if not isinstance(is_on, bool) or not isinstance(tokens, str | None):
        raise UsageError('"capture" is true or false, and "tokens" a text such as "0:16"')
    return is_on, Ranges.parse(tokens) if tokens else None
