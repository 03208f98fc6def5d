"""Limits on the cost of a capture, and the grades that keep it within them."""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from assay.errors import UsageError
from assay.files import Url

Grade = Literal["everything", "outputs", "statistics", "nothing"]
_GRADES: tuple[Grade, ...] = get_args(Grade)

# A grade ends before the pass that would exceed this share of a limit.
_SHARES: Mapping[Grade, float] = {"everything": 0.5, "outputs": 0.9, "statistics": 1.0}

# Left free on a disk for other programs.
_FREE_BYTES = 256 << 20

_SIZE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)\s*([KMGT]?)B?", re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_size(text: str) -> int:
    """Return a number of bytes, such as 20G.

    Raises: UsageError.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or not (size := int(float(found[1]) * _UNITS[found[2].upper()])):
        raise UsageError(f"{text[:40]!r} is not a size such as 500M or 20G")
    return size


_TIME = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)\s*([smh])", re.IGNORECASE)
_SECONDS = {"s": 1, "m": 60, "h": 3600}


def parse_time(text: str) -> float:
    """Return a number of seconds, such as 300 for 5m.

    Raises: UsageError.
    """
    found = _TIME.fullmatch(text.strip())
    if found is None or not (seconds := float(found[1]) * _SECONDS[found[2].lower()]):
        raise UsageError(f"{text[:40]!r} is not a time such as 90s, 5m or 1h")
    return seconds


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
