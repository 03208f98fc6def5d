"""Thresholds of the published token metrics, for all shapes or for single shapes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from assay.comparing.token_thresholds import FAILURE_RATE, PUBLISHED_METRICS
from assay.files import read_toml_record
from assay_expectations.decoders.shapes import Shape

_Metric = Annotated[str, Field(pattern=f"^({'|'.join(PUBLISHED_METRICS)})$")]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The thresholds of one shape."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Threshold of each metric."""
    failure_rate: float = FAILURE_RATE
    """Share of tokens at or over a threshold from which a test fails."""


class _ShapeTable(BaseModel):
    model_config = ConfigDict(extra="forbid")

    failure_rate: _Share | None = None
    thresholds: dict[_Metric, _Positive]


class _File(BaseModel):
    """A file of `assay calibrate`."""

    model_config = ConfigDict(extra="forbid")

    failure_rate: _Share = FAILURE_RATE
    false_failure_bound: float | None = None
    runs: dict[str, object] = Field(default_factory=dict)
    thresholds: dict[_Metric, _Positive]
    shapes: dict[str, _ShapeTable] = Field(default_factory=dict)


def read_thresholds(path: Path) -> tuple[Thresholds, dict[Shape, Thresholds]]:
    """Read a file of `assay calibrate`. Returns: the thresholds for all shapes, and for single shapes.

    A table such as `[shapes.4x64x16.thresholds]`, with an optional `failure_rate` in `[shapes.4x64x16]`,
    serves a single shape.
    Raises: UsageError.
    """
    read = read_toml_record(_File, path)
    by_shape = {
        Shape.parse(name): Thresholds(
            read.thresholds | own.thresholds, own.failure_rate or read.failure_rate
        )
        for name, own in read.shapes.items()
    }
    return Thresholds(read.thresholds, read.failure_rate), by_shape
