"""Limits of the noise ratios, by statistic: data with the runs that they come from, and their calibration."""

import math
import sys
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from assay.dtypes import FORMATS
from assay.errors import UsageError
from assay.files import read_toml
from assay.foreign_text import shorten
from assay.statistics import METRICS, STATISTICS, Statistic
from assay.verdicts import Measurement

CALIBRATED = "noise"
_SHIPPED = Path(__file__).with_name("named_limits")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits by statistic."""

    name: str
    """The value of `--limits`."""
    origin: str
    """The source of the limits, in one line for messages."""
    by_statistic: dict[str, float]

    @property
    def names_metrics(self) -> bool:
        """Return True if metrics have limits, such as the cosine distance."""
        return not METRICS.isdisjoint(self.by_statistic)

    @property
    def names_noise_ratios(self) -> bool:
        """Return True if noise ratios have limits."""
        return not METRICS.issuperset(self.by_statistic)

    def of(self, statistic: Statistic) -> float:
        """Return the limit of `statistic`: 0 if values must be equal. Raises: UsageError without one."""
        if STATISTICS[statistic].judged_by == "zero":
            return 0.0
        for name in (statistic, STATISTICS[statistic].limit_of):
            if name in self.by_statistic:
                return self.by_statistic[name]
        raise UsageError(f"limits {self.name!r} have none for {statistic}")


def load_limits(name: str = CALIBRATED, dtype: str | None = None) -> Limits:
    """Load the shipped limits called `name`, or those of the TOML file of that path.

    dtype: selects among limits by dtype. Without it they are ignored.
    Raises: UsageError for an unknown name, or a file in another format than that of `assay calibrate`.
    """
    if name.endswith(".toml"):
        file = Path(name)
    else:
        file = _SHIPPED / f"{name}.toml"
        if name not in shipped_limits():
            raise UsageError(f"no limits called {name!r}; shipped: {', '.join(shipped_limits())}")
    try:
        return _parse(name, read_toml(file), dtype)
    except ValueError as error:
        raise UsageError(f"limits {name}: {shorten(error)}") from None


def _parse(name: str, data: Mapping[str, Any], dtype: str | None) -> Limits:
    origin, table = data.get("origin"), data.get("limits")
    if not isinstance(origin, str) or not isinstance(table, dict):
        raise ValueError("needs a text `origin` and a table `limits`")  # noqa: TRY004 - of a file
    chosen = {}
    for statistic, value in table.items():
        if statistic not in get_args(Statistic):
            raise ValueError(f"unknown statistic {statistic!r}")
        by_dtype = value if isinstance(value, dict) else {dtype: value}
        for key, limit in by_dtype.items():
            if key not in (dtype, *FORMATS):
                raise ValueError(f"the limit of {statistic} is for an unknown dtype {key!r}")
            # With a limit of NaN or infinity nothing would ever fail.
            if not isinstance(limit, int | float) or not 0 < limit <= sys.float_info.max:
                raise ValueError(f"the limit of {statistic} is not a positive number: {limit!r}")
        if dtype in by_dtype:
            chosen[statistic] = float(by_dtype[dtype])
    if dtype is not None and not chosen:
        raise ValueError(f"no limit is for {dtype}")
    return Limits(name, origin, chosen)


def shipped_limits() -> list[str]:
    """Return the names of the limits in this package."""
    return sorted(file.stem for file in _SHIPPED.glob("*.toml"))


# The ratios of clean runs are maxima over hundreds of places, so their distribution has a short tail.
MARGIN = 1.25

# Two correct orders of summation can differ by a ratio of 2.
SMALLEST_LIMIT = 2.0


@dataclass(frozen=True, slots=True)
class CleanRun:
    """A correct variant and its largest ratio of each statistic."""

    name: str
    ratios: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class DerivedLimit:
    """A limit that follows from a distribution; clean runs can only raise it."""

    limit: float
    reason: str
    """The distribution, in whole sentences."""


def largest_ratios(measurements: Iterable[Measurement]) -> dict[str, float]:
    """Return the largest judged ratio of each statistic that has a limit above zero.

    Raises: UsageError if a ratio is not finite, so that the run is not clean.
    """
    largest: dict[str, float] = {}
    for row in measurements:
        if row.limit and row.prompt is None:
            if not math.isfinite(row.ratio):
                where = f"{row.module or '(model)'} {row.port}"
                raise UsageError(f"{row.statistic} is {row.ratio} at {where}: no clean run")
            largest[row.statistic] = max(largest.get(row.statistic, 0.0), row.ratio)
    return largest


def calibrate_limits(runs: Iterable[CleanRun]) -> dict[str, float]:
    """Return `MARGIN` times the largest clean ratio of each statistic, rounded up to two digits.

    Raises: UsageError without a clean run.
    """
    runs = list(runs)
    if not runs:
        raise UsageError("no clean run to calibrate on")
    names = sorted({name for run in runs for name in run.ratios})
    return {
        name: _round_up(
            max(SMALLEST_LIMIT, MARGIN * max(run.ratios.get(name, 0.0) for run in runs))
        )
        for name in names
    }


def false_alarm_bound(num_runs: int) -> float:
    """Return the upper bound, at 95%, of the share of clean runs over the largest of these ratios.

    It holds for runs that the largest ratio was taken from (Wilks, Annals of Mathematical Statistics 12
    (1941) 91: tolerance limits), and for runs that passed other limits (Hanley & Lippman-Hand, JAMA
    249 (1983) 1743: the rule of three).
    """
    return min(1.0, 3.0 / num_runs)


def limits_file(
    runs: Iterable[CleanRun],
    command: str,
    derived: Mapping[str, DerivedLimit] = MappingProxyType({}),
) -> str:
    """Return the text of a limits file, with its runs. derived: by statistic."""
    runs = list(runs)
    limits = calibrate_limits(runs)
    for name, known in derived.items():
        limits[name] = max(known.limit, limits.get(name, 0.0))
    bound = false_alarm_bound(len(runs))
    lines = [
        f"# Made by: {command}",
        f"# A limit is {MARGIN} times the largest ratio of {len(runs)} clean runs. At 95% fewer",
        f"# than {bound:.1%} of such runs have a ratio over even the largest, for each statistic.",
        *(
            line
            for name, known in derived.items()
            for line in ["#", *_wrap(f"{name}, at least {known.limit}: {known.reason}")]
        ),
        f'origin = "calibrated on {len(runs)} clean runs"',
        "",
        "[limits]",
        *(f"{name} = {limits[name]}" for name in sorted(limits)),
        "",
        "# Largest ratio of each statistic, by run.",
        "[runs]",
    ]
    for run in runs:
        ratios = ", ".join(f"{name} = {value:.3g}" for name, value in sorted(run.ratios.items()))
        lines.append(f'"{run.name}" = {{ {ratios} }}')
    return "\n".join(lines) + "\n"


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, 98, initial_indent="# ", subsequent_indent="# ")


def _round_up(value: float) -> float:
    digits = 1 - math.floor(math.log10(value))
    scale = 10.0**digits
    return math.ceil(value * scale) / scale
