"""Find scales that quantizers such as AWQ and SmoothQuant move from one weight to the next.

They divide a norm's weight, or a linear's rows, by a factor per channel, and multiply the columns of the
linears that read these channels by it. The model's output stays the same.
"""

import re
from dataclasses import dataclass, replace
from statistics import NormalDist

import torch
from torch import Tensor

# Alternating least squares: the second pass changes the factors by less than their noise.
_PASSES = 3
# Factors with a smaller median deviation are noise of the fit, which is 0.1 / sqrt(rows) for 4 bits.
_LEAST_SPREAD = 0.01
# Largest deviation from 1, in the median channel, of the product of factors that cancel.
_MOST_APART = 0.05
# The limit for one channel, in standard deviations of all: noise reaches 5 among 100,000.
_MOST_DEVIATIONS = 8.0
_LAYER = re.compile(r"(.*?\.\d+)\.")


@dataclass(frozen=True)
class Factors:
    """Factors of the rows and columns of a weight; a vector has only rows."""

    rows: Tensor
    columns: Tensor
    is_exact: bool = True
    """False if they were fitted to quantized values and are noisy."""
    apart: tuple[int, ...] = ()
    """Rows whose factor does not cancel the other weight's."""

    def apply(self, reference: Tensor) -> Tensor:
        """Return the weight with its factors, float32."""
        if not len(self.columns):
            return reference.float() * self.rows
        return reference.float() * self.rows[:, None] * self.columns


def fit_factors(expected: Tensor, actual: Tensor) -> Factors:
    """Fit factors of rows and columns that bring `expected` closest to `actual`."""
    want, have = expected.float(), actual.float()
    if want.dim() == 1:
        return Factors(torch.where(want == 0, 1.0, have / want), torch.ones(0))
    rows, columns = torch.ones(len(want)), torch.ones(want.shape[1])
    for _ in range(_PASSES):
        scaled = want * rows[:, None]
        columns = _slope(scaled, have, 0)
        rows = _slope(want * columns, have, 1)
    return Factors(rows, columns)


def _slope(expected: Tensor, actual: Tensor, dim: int) -> Tensor:
    squares = expected.square().sum(dim)
    return torch.where(squares > 0, (expected * actual).sum(dim) / squares, 1.0).nan_to_num(1.0)


def explain_factors(fitted: dict[str, Factors]) -> dict[str, Factors]:
    """Return the factors that cancel those of another weight of the layer, by weight.

    A factor that nothing cancels stays 1, so that it counts as an error.
    """
    found: dict[str, Factors] = {}
    known = dict(fitted)
    for producers_are_vectors in (True, False):
        for name, factors in fitted.items():
            if name in found and found[name].columns.ne(1).any():
                continue  # explained by a vector
            for producer, others in known.items():
                is_vector = not len(others.columns)
                if (
                    is_vector != producers_are_vectors
                    or producer == name
                    or layer_of(producer) != layer_of(name)
                    or not _cancel(factors.columns, others.rows)
                ):
                    continue
                product = factors.columns * others.rows
                if is_vector:
                    # A fit leaves a constant open between rows and columns, which a vector determines.
                    known[name] = Factors(factors.rows * product.median(), factors.columns)
                own, theirs = (found.get(one, _ones(fitted[one])) for one in (name, producer))
                found[name] = replace(
                    own, columns=1 / others.rows, is_exact=is_vector and own.is_exact
                )
                apart = (*theirs.apart, *_find_apart(factors.columns, others.rows))
                found[producer] = replace(theirs, rows=others.rows, is_exact=is_vector, apart=apart)
                break
    return found


def _find_apart(columns: Tensor, rows: Tensor) -> list[int]:
    """Return the channels in which two factors do not cancel as in the others.

    The values of a group share one rounding error, so small columns have noisier factors.
    """
    product = columns * rows
    logs = (product / product.median()).abs().clamp(min=1e-30).log()
    logs = logs.abs() * (columns / columns.median()).abs().clamp(max=1)
    limit = float(_MOST_DEVIATIONS * logs.median() / NormalDist().inv_cdf(0.75))
    return (logs > max(limit, _MOST_APART)).nonzero()[:, 0].tolist()


def _ones(factors: Factors) -> Factors:
    return Factors(torch.ones_like(factors.rows), torch.ones_like(factors.columns))


def layer_of(name: str) -> str:
    """Return the decoder layer that a weight belongs to; "" for none."""
    match = _LAYER.match(name)
    return match[1] if match else ""


def _spread(factors: Tensor) -> float:
    logs = factors.abs().clamp(min=1e-30).log()
    return float((logs - logs.median()).abs().median())


def _cancel(columns: Tensor, rows: Tensor) -> bool:
    if len(columns) != len(rows) or _spread(rows) < _LEAST_SPREAD:
        return False
    return _spread(columns * rows) < min(_MOST_APART, _spread(columns) / 2)
