"""Limits of the noise ratios and of published metrics: data with the runs that they come from."""

import json
import math
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from assay.dtypes import FORMATS
from assay.errors import UsageError
from assay.files import read_record_lines, read_toml
from assay.foreign_text import shorten
from assay.runs.results import VERDICT_FILE, read_verdict
from assay.statistics import METRICS, STATISTICS, Statistic
from assay.verdicts import Measurement, Outcome

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


def _describe_bound(num_runs: int, what: str) -> tuple[str, str]:
    """Say in two lines how rarely clean runs do `what`, as far as so many runs show it."""
    bound = false_alarm_bound(num_runs)
    if bound >= 1:
        return "So few runs do not", f"show how many such runs {what}: give at least 4."
    return "At 95% fewer", f"than {bound:.1%} of such runs {what}."


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
    share = _describe_bound(len(runs), "have a ratio over even the largest, for each statistic")
    lines = [
        f"# Made by: {command}",
        f"# A limit is {MARGIN} times the largest ratio of {len(runs)} clean runs. {share[0]}",
        f"# {share[1]}",
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


# Thresholds for the published metrics of tokens. A run fails by a metric when the share of its tokens at or
# over the threshold reaches the failure rate. So the threshold must exceed, for each run, the value that this
# share of its tokens reaches. A 99th percentile of pooled tokens, as it is published, fails clean runs.
PUBLISHED_METRICS = ("cross_entropy", "prob_mean", "prob_std", "diff_mean")

# Half of float32's relative spacing: metrics of softmaxed float32 logits resolve no less.
_SMALLEST_THRESHOLD = 2.0**-24

# Source: FMS_TEST_SHAPES_FAILURE_THRESHOLD of aiu-fms-testing-utils.
FAILURE_RATE = 0.01


@dataclass(frozen=True, slots=True)
class CleanTokens:
    """The values of each published metric at all tokens of a clean run."""

    name: str
    values: Mapping[str, Sequence[float]]


def read_clean_tokens(file: Path) -> CleanTokens:
    """Read the published metrics in a measurements.jsonl.

    Raises: UsageError if it cannot be read, its run did not pass, or a metric is missing or not finite.
    """
    if file.with_name(VERDICT_FILE).is_file():
        outcome = read_verdict(file.parent).verdict
        if outcome is not Outcome.PASS:
            raise UsageError(f"{file.parent} is {outcome.value}: no clean run")
    values: dict[str, list[float]] = {name: [] for name in PUBLISHED_METRICS}
    for row in read_record_lines(Measurement, file):
        if row.statistic in values:
            values[row.statistic].append(row.actual)
    for name, found in values.items():
        if not found:
            raise UsageError(f"metrics {file}: there is no token with {name}")
        if not all(map(math.isfinite, found)):
            raise UsageError(f"metrics {file}: {name} is not finite at a token: no clean run")
    return CleanTokens(str(file), values)


def passing_value(values: Sequence[float], failure_rate: float) -> float:
    """Return the value that a threshold must exceed for a run to pass.

    A run passes if fewer than `failure_rate` of its tokens are at or over the threshold.
    """
    num_allowed = math.ceil(failure_rate * len(values)) - 1
    return sorted(values, reverse=True)[num_allowed]


def calibrate_thresholds(runs: Sequence[CleanTokens]) -> dict[str, float]:
    """Return for each metric the threshold with which all `runs` pass, with a margin.

    A metric that is exact in all runs, or signed and below zero, gets the smallest threshold.
    Raises: UsageError without a run, or for two runs of the same content.
    """
    if not runs:
        raise UsageError("no metrics to calibrate on")
    for number, run in enumerate(runs):
        for other in runs[:number]:
            if other.values == run.values:
                raise UsageError(
                    f"{other.name} and {run.name} are the same metrics: give one of them"
                )
    needed = {
        name: max(passing_value(run.values[name], FAILURE_RATE) for run in runs)
        for name in PUBLISHED_METRICS
    }
    return {name: max(MARGIN * value, _SMALLEST_THRESHOLD) for name, value in needed.items()}


def thresholds_file(runs: Sequence[CleanTokens], command: str) -> str:
    """Return the text of a file of thresholds, with the runs that they come from."""
    thresholds = calibrate_thresholds(runs)
    share = _describe_bound(len(runs), "fail, for each metric")
    lines = [
        f"# Made by: {command}",
        f"# A run fails when {FAILURE_RATE:.0%} of its tokens are at or over a threshold, which is {MARGIN}",
        f"# times what the worst of {len(runs)} clean runs needs to pass. {share[0]}",
        f"# {share[1]}",
        f"failure_rate = {FAILURE_RATE}",
        f"false_failure_bound = {false_alarm_bound(len(runs)):.3g}",
        "",
        "[thresholds]",
        *(f"{name} = {value:.6g}" for name, value in thresholds.items()),
        "",
        "# What a threshold must be above for each run to pass.",
        "[runs]",
    ]
    for run in runs:
        needed = ", ".join(
            f"{name} = {passing_value(values, FAILURE_RATE):.6g}"
            for name, values in run.values.items()
        )
        num_tokens = len(run.values["cross_entropy"])
        lines.append(f"{json.dumps(run.name)} = {{ tokens = {num_tokens}, {needed} }}")
    return "\n".join(lines) + "\n"


def published_pair(thresholds: Mapping[str, float]) -> str:
    """Return the variable that sets the thresholds of test_decoders.py in aiu-fms-testing-utils."""
    pair = ",".join(f"{thresholds[name]:.6g}" for name in ("cross_entropy", "diff_mean"))
    return f"FMS_TEST_SHAPES_METRICS_THRESHOLD={pair}"
