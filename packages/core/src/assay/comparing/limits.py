"""Limits of the noise ratios, by statistic: data with the runs that they come from."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from assay.dtypes import FORMATS
from assay.errors import UsageError
from assay.files import read_toml
from assay.foreign_text import shorten
from assay.statistics import METRICS, STATISTICS, Statistic

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
