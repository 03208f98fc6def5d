"""Limits of the noise ratios, by statistic: data with the runs that they come from."""

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from assay.errors import UsageError
from assay.noise import Statistic

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
    path = Path(name)
    if path.suffix == ".toml":
        if not path.is_file():
            raise UsageError(f"no limits file {name}")
        text = path.read_text()
    else:
        shipped = files("assay.comparing") / "named_limits" / f"{name}.toml"
        if not shipped.is_file():
            raise UsageError(f"no limits called {name!r}; shipped: {', '.join(shipped_limits())}")
        text = shipped.read_text()
    try:
        data = tomllib.loads(text)
        values = {key: float(value) for key, value in data["limits"].items()}
        return Limits(name, str(data["origin"]), values)
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"limits {name}: {error}") from None


def shipped_limits() -> list[str]:
    """Names of the limits that come with the package."""
    folder = files("assay.comparing") / "named_limits"
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir())
