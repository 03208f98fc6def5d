"""Numbers as places in a picture: intervals beside their margin, losses by step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Self

from assay_bench.tuning.records import Tuning

# Points of a picture, in its own units: the browser scales them.
WIDTH, HEIGHT = 600.0, 120.0
# A curve of many steps is drawn by the means of so many windows.
_MOST_POINTS = 120


@dataclass(frozen=True, slots=True)
class Interval:
    """One measure of a comparison, drawn from two margins below to two above; what is beyond is cut off.

    low, high, difference, margin, zero: places from the left, in percent.
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
        """From a measure of comparison.json."""
        # How far something moved has its margin above zero; what must not fall has it below.
        is_movement = measure["name"] == "movement"
        margin = measure["margin"] if is_movement else -measure["margin"]

        def place(value: float) -> float:
            return max(0.0, min(100.0, 50 + 25 * value / float(measure["margin"])))

        return cls(
            task=task,
            name=measure["name"],
            judged=measure["judged"],
            words=f"{measure['base']:.4g} → {measure['candidate']:.4g}, {measure['num_items']:,} items",
            low=place(measure["low"]),
            difference=place(measure["difference"]),
            high=place(measure["high"]),
            margin=place(margin),
        )


@dataclass(frozen=True, slots=True)
class LossCurve:
    """A line in a picture. points: of an SVG polyline; low, high: of its values, for the axis."""

    title: str
    points: str
    low: float
    high: float
    words: str

    @classmethod
    def of(cls, tuning: Tuning) -> Self:
        """The loss by step."""
        values = _windowed(tuning.curve)
        words = f"{tuning.curve[0]:.3f} → {fmean(tuning.curve[-10:]):.3f} nats a token"
        return cls(tuning.record.title, _points(values), min(values), max(values), words)


def _windowed(values: Sequence[float]) -> list[float]:
    size = math.ceil(len(values) / _MOST_POINTS)
    return [fmean(values[start : start + size]) for start in range(0, len(values), size)]


def _points(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    scale = HEIGHT / (high - low) if high > low else 0.0
    step = WIDTH / max(1, len(values) - 1)
    return " ".join(
        f"{number * step:.1f},{HEIGHT - (value - low) * scale:.1f}"
        for number, value in enumerate(values)
    )
