"""Comparison of tensors by statistics, for dumps without values."""

import math
from collections.abc import Mapping

import torch

from assay.dumps.protocol import Dump, DumpedTensor, Statistic
from assay.recording.recorders import NAMES, measure_statistics, take_values
from assay.statistics import worst_error


def read_norms(dump: Dump, tensor: DumpedTensor) -> Mapping[Statistic, float] | None:
    """Return the recorded statistics of a tensor, or measure its values; None without a norm."""
    if not tensor.has_values:
        return tensor.statistics if "norm" in tensor.statistics else None
    value = dump.read_intact(tensor)
    if value is None:
        return None
    if not value.is_floating_point() or not value.numel():
        return {"norm": float(torch.linalg.vector_norm(value, dtype=torch.float64))}
    found = measure_statistics(value)
    return dict(zip(NAMES, take_values([found])[id(found)].tolist(), strict=True))


def compare_norms(
    actual: Mapping[Statistic, float], expected: Mapping[Statistic, float]
) -> float | None:
    """Return the relative error of the norm or of the projection, the larger of the two.

    Returns: nan if only `actual` is not finite; inf if only `expected` is 0; None if `expected` is not
        finite, unless both hold as many infinities, as in masks.
    """
    norm, expected_norm = actual["norm"], expected["norm"]
    if not math.isfinite(expected_norm):
        is_alike = norm == expected_norm and actual.get("inf") == expected.get("inf")
        return 0.0 if is_alike else None
    if not math.isfinite(norm):
        return math.nan
    if not expected_norm:
        return math.inf if norm else 0.0
    difference = abs(norm - expected_norm)
    channels = actual.get("channels")
    if channels is not None and channels == expected.get("channels"):
        projections = abs(actual["projection"] - expected["projection"])
        difference = worst_error([difference, projections])
    return difference / expected_norm
