"""Coordinates of the pictures on the page: intervals with their margin, and loss curves."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Self

from assay_bench.tuning.records import Tuning

# In the picture's own units, which the browser scales.
WIDTH, HEIGHT = 600.0, 120.0
# Longer curves are drawn as means of windows.
_MAX_POINTS = 120


@dataclass(frozen=True, slots=True)
class Interval:
    """One measure of a comparison, drawn from two margins below zero to two above.

    Positions are percentages of the width, clipped to the picture.
    """

    task: str
    name: str
    judged: str
    words: str
    low: float
    difference: float
    high: float
    margin: float
    zero: float = 50.0

    @classmethod
    def of(cls, task: str, measure: dict[str, Any]) -> Self:
        """Make the interval from a measure of comparison.json."""
        # A movement has an upper limit, all other measures a lower one.
        is_movement = measure["name"] == "movement"
        margin = measure["margin"] if is_movement else -measure["margin"]

        def position(value: float) -> float:
            return max(0.0, min(100.0, 50 + 25 * value / float(measure["margin"])))

        return cls(
            task=task,
            name=measure["name"],
            judged=measure["judged"],
            words=f"{measure['base']:.4g} → {measure['candidate']:.4g}, {measure['num_items']:,} items",
            low=position(measure["low"]),
            difference=position(measure["difference"]),
            high=position(measure["high"]),
            margin=position(margin),
        )


@dataclass(frozen=True, slots=True)
class LossCurve:
    """The losses of a tuning by step."""

    title: str
    points: str
    """Points of an SVG polyline."""
    low: float
    """Smallest value, for the axis."""
    high: float
    words: str

    @classmethod
    def of(cls, tuning: Tuning) -> Self:
        """Make the curve of a finished tuning."""
        values = _windowed(tuning.curve)
        words = f"{tuning.curve[0]:.3f} → {fmean(tuning.curve[-10:]):.3f} nats per token"
        return cls(tuning.record.title, _points(values), min(values), max(values), words)


def _windowed(values: Sequence[float]) -> list[float]:
    size = math.ceil(len(values) / _MAX_POINTS)
    return [fmean(values[start : start + size]) for start in range(0, len(values), size)]


def _points(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    scale = HEIGHT / (high - low) if high > low else 0.0
    step = WIDTH / max(1, len(values) - 1)
    return " ".join(
        f"{number * step:.1f},{HEIGHT - (value - low) * scale:.1f}"
        for number, value in enumerate(values)
    )
