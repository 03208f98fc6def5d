"""Selection of the measurements that decided a verdict."""

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from assay.statistics import STATISTICS
from assay.verdicts import Location, Measurement, Number, Record, Verdict

# The statistic of single tokens, which is never judged: rows of clean runs reach a ratio of 20.
TOKEN_STATISTIC = "token"  # noqa: S105 - not a password

# The statistics that see an error of any form, the most telling first.
_GENERAL = [name for name, entry in STATISTICS.items() if entry.is_general]

Key = TypeVar("Key", bound=Hashable)


class ShownElement(Record):
    """The element with the largest difference at the place that decided."""

    prompt: int
    position: int
    """Prompt and position are -1 if the element does not belong to a token."""
    channel: int
    actual: Number
    expected: Number


@dataclass(frozen=True, slots=True)
class DecidingRows:
    """Measurements that the text of a verdict quotes."""

    deciding: Measurement | None = None
    """The row whose ratio decided; None if no row holds exactly that ratio."""
    worst_token: Measurement | None = None
    """The worst single token at the place of the error."""
    worst_element: ShownElement | None = None
    limits_origin: str | None = None
    """The origin of the limit, as in "calibrated on 312 clean runs"."""
    error: float | None = None
    """The candidate's error behind the deciding ratio; None if no file holds it."""
    coarsest: dict[str, Measurement] = field(default_factory=dict)
    """By level, the row with the coarsest resolution for errors of any form."""


def severity(value: float) -> float:
    """Return a key that ranks ratios: NaN is as bad as infinity."""
    return math.inf if math.isnan(value) else value


def rank_by_ratio(measurement: Measurement) -> float:
    """Return a key that ranks rows of one statistic."""
    return severity(measurement.ratio)


def shown_ratio(measurement: Measurement) -> float | None:
    """Return the ratio of a row; None for values that are shown without noise."""
    ratio = measurement.ratio
    if not math.isnan(ratio):
        return ratio
    values = measurement.actual, measurement.expected
    return None if all(math.isfinite(value) for value in values) else ratio


def rank_of(measurement: Measurement) -> float:
    """Return a key that ranks rows, the worst highest; rows without a ratio are lowest."""
    ratio = shown_ratio(measurement)
    return -1.0 if ratio is None else severity(ratio)


def over_limit(measurement: Measurement) -> float:
    """Return a key that ranks judged rows of different statistics: ratio / limit."""
    limit = measurement.limit
    if not limit:
        return severity(measurement.ratio)
    return severity(measurement.ratio / limit)


def find_worst_rows(
    rows: Iterable[tuple[Key, Measurement]],
    rank: Callable[[Measurement], Any] = over_limit,
) -> dict[Key, Measurement]:
    """Return the row of highest rank for each key, the first of equal ones."""
    worst: dict[Key, Measurement] = {}
    for key, row in rows:
        if key not in worst or rank(row) > rank(worst[key]):
            worst[key] = row
    return worst


def resolution_of(row: Measurement) -> float:
    """Return the smallest relative error that would have failed at a judged row."""
    floor = row.actual / row.ratio if 0 < row.ratio < math.inf else 0.0
    return (row.limit or 0.0) * max(row.expected, floor)


def find_coarsest_rows(rows: Iterable[Measurement]) -> dict[str, Measurement]:
    """Return for each level the row of coarsest resolution, of its most general statistic."""
    judged = (row for row in rows if row.limit and row.statistic in _GENERAL)
    keyed = ((row.level, row) for row in judged)
    return find_worst_rows(keyed, lambda row: (-_GENERAL.index(row.statistic), resolution_of(row)))


def find_deciding_rows(verdict: Verdict, measurements: Iterable[Measurement]) -> DecidingRows:
    """Find the rows behind the numbers of `verdict`."""
    measurements = list(measurements)
    near = [row for row in measurements if _is_at(row, verdict.location)]
    tokens = [row for row in near if row.statistic == TOKEN_STATISTIC and row.prompt is not None]
    deciding = next((row for row in near if _decided(row, verdict)), None)
    extras = _extras(verdict, deciding)
    element = extras.get("worst_element", {})  # for older runs, which have only an index
    return DecidingRows(
        deciding=deciding,
        worst_token=max(tokens, key=rank_by_ratio, default=None) if verdict.location else None,
        worst_element=ShownElement.model_validate(element) if "channel" in element else None,
        limits_origin=extras.get("limits_origin"),
        error=deciding.actual if deciding else _error_of_suspect(verdict),
        coarsest=find_coarsest_rows(measurements),
    )


def _error_of_suspect(verdict: Verdict) -> float | None:
    """Return the deciding error from the suspects when the measurements are unavailable."""
    decided = (verdict.noise_ratio, verdict.statistic)
    return next(
        (one.error for one in verdict.suspects if (one.noise_ratio, one.statistic) == decided), None
    )


def _is_at(row: Measurement, location: Location | None) -> bool:
    if location is None:
        return True
    # A fault without a single module is shown by the row that decided, in any module.
    return row.phase == location.phase and location.module in (None, row.module)


def _decided(row: Measurement, verdict: Verdict) -> bool:
    if verdict.noise_ratio is None or row.statistic != verdict.statistic:
        return False
    both_nan = math.isnan(row.ratio) and math.isnan(verdict.noise_ratio)
    return both_nan or row.ratio == verdict.noise_ratio


def _extras(verdict: Verdict, deciding: Measurement | None) -> dict[str, Any]:
    """Return the facts that the judge left with the deciding level."""
    names = [deciding.level] if deciding else []
    names += [name for name, level in verdict.levels.items() if level.verdict is verdict.verdict]
    for name in names:
        level = verdict.levels.get(name)
        if level is not None and level.model_extra:
            return level.model_extra
    return {}
