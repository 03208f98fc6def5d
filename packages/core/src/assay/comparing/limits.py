"""Limits of the noise ratios, by statistic: data with the runs that they come from."""

import math
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from assay.errors import UsageError
from assay.stages import Statistic

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

CALIBRATED = "noise"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits by statistic.

    name: as given to `--limits`; origin: one line for messages, saying where they come from.
    """

    name: str
    origin: str
    by_statistic: dict[str, float]

    def of(self, statistic: Statistic) -> float:
        """The limit of `statistic`; what must be exact has the limit 0."""
        if statistic in ("exact", "non-finite"):
            return 0.0
        try:
            return self.by_statistic[statistic]
        except KeyError:
            raise UsageError(f"limits {self.name!r} have none for {statistic}") from None


def load_limits(name: str = CALIBRATED) -> Limits:
    """The shipped limits called `name`, or those of a TOML file of that path.

    Raises: UsageError if there are none, or the file has not the form of `assay calibrate`.
    """
    if name.endswith(".toml"):
        file: Traversable = Path(name)
        if not file.is_file():
            raise UsageError(f"no limits file {name}")
    else:
        file = files("assay.comparing") / "named_limits" / f"{name}.toml"
        if not file.is_file():
            raise UsageError(f"no limits called {name!r}; shipped: {', '.join(shipped_limits())}")
    try:
        return _parse(name, file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"limits {name}: {error}") from None


def _parse(name: str, text: str) -> Limits:
    data = tomllib.loads(text)
    origin, table = data.get("origin"), data.get("limits")
    if not isinstance(origin, str) or not isinstance(table, dict):
        raise ValueError("needs a text `origin` and a table `limits`")  # noqa: TRY004 - of a file
    for statistic, limit in table.items():
        if statistic not in get_args(Statistic):
            raise ValueError(f"unknown statistic {statistic!r}")
        # By a NaN or an infinity nothing would ever fail.
        if not isinstance(limit, int | float) or not 0 < limit < math.inf:
            raise ValueError(f"the limit of {statistic} is {limit!r}, not a positive number")
    return Limits(name, origin, {statistic: float(limit) for statistic, limit in table.items()})


def shipped_limits() -> list[str]:
    """Names of the limits that come with the package."""
    folder = files("assay.comparing") / "named_limits"
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir())
