"""What is asked of the published metrics of tokens: for all shapes, or for some their own."""

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
    """What one shape is held to.

    metrics: thresholds by the name of the metric; failure_rate: the share of tokens at or over one
        from which a test fails.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    failure_rate: float = FAILURE_RATE


class _OfShape(BaseModel):
    model_config = ConfigDict(extra="forbid")

    failure_rate: _Share | None = None
    thresholds: dict[_Metric, _Positive]


class _File(BaseModel):
    """As `assay calibrate` writes it; what the thresholds come from is for people."""

    model_config = ConfigDict(extra="forbid")

    failure_rate: _Share = FAILURE_RATE
    false_failure_bound: float | None = None
    runs: dict[str, object] = Field(default_factory=dict)
    thresholds: dict[_Metric, _Positive]
    shapes: dict[str, _OfShape] = Field(default_factory=dict)


def read_thresholds(path: Path) -> tuple[Thresholds, dict[Shape, Thresholds]]:
    """Those of a file as `assay calibrate` writes it: for all shapes, and for some their own.

    Their own stand in tables such as `[shapes.4x64x16.thresholds]`, with a `failure_rate` beside it
    where it is another.
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
