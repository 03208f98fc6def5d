"""Judges the results of several ranks by those of one process: errors against float64, as ratios.

The *noise* is the error of one process in the same dtype. What is divided over ranks adds in
another order, and may round a few times more; whatever is wrong is off by far more than that.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# Of 17594 tensors of clean runs on the host, the largest ratio was 4.2; the smallest of the planted
# faults, each by its worst tensor, was 24.
LIMIT = 10.0


def plain(tensor: Tensor) -> Tensor:
    """The whole tensor, on the host, as it is now."""
    whole = tensor.detach()
    whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
    return whole.cpu().clone()


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Frobenius-norm relative error; nan where either holds a NaN."""
    size = float(exact.double().norm())
    error = float((actual.double() - exact.double()).norm())
    return error / size if size else float("inf") if error else error


def ratios(
    actual: Mapping[str, Tensor], noise: Mapping[str, Tensor], exact: Mapping[str, Tensor]
) -> dict[str, float]:
    """By name, the error as a multiple of the noise, which is at least two unit roundoffs.

    Below that, noise is luck: a scalar may come out exact.
    """
    assert exact, "nothing to compare with"
    assert actual.keys() == exact.keys() == noise.keys()
    found = {}
    for name, expected in exact.items():
        assert actual[name].shape == expected.shape, name
        assert actual[name].dtype == noise[name].dtype, name
        floor = torch.finfo(actual[name].dtype).eps
        error = relative_error(actual[name], expected)
        found[name] = error / max(relative_error(noise[name], expected), floor)
    return found


def differing(
    actual: Mapping[str, Tensor], noise: Mapping[str, Tensor], exact: Mapping[str, Tensor]
) -> list[str]:
    """The names of the tensors that are off by more than `LIMIT` times the noise."""
    found = ratios(actual, noise, exact)
    return [name for name, ratio in found.items() if not ratio <= LIMIT]  # nan is not
