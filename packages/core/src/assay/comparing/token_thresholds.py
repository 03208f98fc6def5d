"""Thresholds for the published metrics of tokens, calibrated on the metrics of clean runs.

A run fails by a metric when the share of its tokens at or over the threshold reaches the failure
rate. So the threshold must exceed, for each run, the value that this share of its tokens reaches. A 99th
percentile of pooled tokens, as it is published, fails clean runs.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from assay.comparing.limits import MARGIN, false_alarm_bound
from assay.errors import UsageError
from assay.files import read_record_lines
from assay.verdicts import Measurement

PUBLISHED_METRICS = ("cross_entropy", "prob_mean", "prob_std", "diff_mean")

# Half of float32's relative spacing: metrics of softmaxed float32 logits resolve no less.
_SMALLEST = 2.0**-24

# Source: FMS_TEST_SHAPES_FAILURE_THRESHOLD of aiu-fms-testing-utils.
FAILURE_RATE = 0.01


@dataclass(frozen=True, slots=True)
class CleanTokens:
    """The values of each published metric at all tokens of a clean run."""

    name: str
    values: Mapping[str, Sequence[float]]


def read_clean_tokens(file: Path) -> CleanTokens:
    """Read the published metrics in a measurements.jsonl.

    Raises: UsageError if it cannot be read, or a metric is missing or not finite.
    """
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
    return {name: max(MARGIN * value, _SMALLEST) for name, value in needed.items()}


def thresholds_file(runs: Sequence[CleanTokens], command: str) -> str:
    """Return the text of a file of thresholds, with the runs that they come from."""
    thresholds = calibrate_thresholds(runs)
    lines = [
        f"# Made by: {command}",
        f"# A run fails when {FAILURE_RATE:.0%} of its tokens are at or over a threshold, which is {MARGIN}",
        f"# times what the worst of {len(runs)} clean runs needs to pass. At 95% fewer than",
        f"# {false_alarm_bound(len(runs)):.1%} of such runs fail, for each metric.",
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
