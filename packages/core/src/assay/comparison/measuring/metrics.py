"""Published and custom metrics of tensor pairs.

`measure_metrics` corrects the published formulas; `measure_as_published` keeps them. The published formulas
ignore absolute errors where the expected value is zero, take one softmax over the whole tensor instead of
one per row, give a tensor of zeros the distance 0 to any other tensor, and yield nothing for a tensor with a
NaN or an infinity.
Source: Ascend msit 8, components/llm, cmp_algorithm.py.

Shape legend: R rows (tokens), C channels (last dim).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real

import torch
from torch import Tensor

from assay.comparison.pairing.port_series import Port
from assay.dumps.protocol import DumpedTensor
from assay.errors import UsageError, raised_in_words
from assay.metrics import ShapeMismatchError
from assay.output.tables import Cell
from assay.plugins import find_plugin_file, load_object
from assay.statistics import Statistic

# Elements per block. Fastest of 2**14 to 2**20: a float64 intermediate result is 1 MB, which fits the caches.
BLOCK_ELEMENTS = 1 << 17

# The published formulas treat expected values up to this size as zero.
EPSILON = torch.finfo(torch.float32).eps


@dataclass(frozen=True, slots=True)
class PairMetrics:
    """Metrics of one pair of tensors; nan where a metric is not defined."""

    cosine_similarity: float = math.nan
    max_relative_error: float = math.nan
    mean_relative_error: float = math.nan
    max_absolute_error: float = math.nan
    mean_absolute_error: float = math.nan
    kl_divergence: float = math.nan
    """In nats; the corrected formula takes the worst row."""
    relative_euclidean_distance: float = math.nan
    num_nonfinite_expected: int = 0
    """Number of NaN and infinities. The corrected metrics cover elements that are finite on both sides."""
    num_nonfinite_actual: int = 0


MeasurePair = Callable[[Tensor, Tensor], PairMetrics]


def measure_metrics(expected_RC: Tensor, actual_RC: Tensor) -> PairMetrics:
    """Measure one pair by the corrected formulas, in float64.

    Raises: ShapeMismatchError if the shapes differ.
    """
    metrics = _measure_elements(expected_RC, actual_RC, torch.float64, zero=-1.0)
    divergences = kl_divergences(expected_RC, actual_RC)
    defined = divergences[~divergences.isnan()]
    return replace(metrics, kl_divergence=float(defined.max())) if len(defined) else metrics


def measure_as_published(expected_RC: Tensor, actual_RC: Tensor) -> PairMetrics:
    """Measure one pair by the published formulas: elements in float32, sums in float64.

    Raises: ShapeMismatchError if the shapes differ.
    """
    metrics = _measure_elements(expected_RC, actual_RC, torch.float32, zero=EPSILON)
    counts = metrics.num_nonfinite_expected, metrics.num_nonfinite_actual
    if any(counts) or not expected_RC.numel():
        return PairMetrics(num_nonfinite_expected=counts[0], num_nonfinite_actual=counts[1])
    flat = (one.reshape(1, -1).float() for one in (expected_RC, actual_RC))
    return replace(metrics, kl_divergence=float(kl_divergences(*flat)))


def _measure_elements(
    expected: Tensor, actual: Tensor, dtype: torch.dtype, zero: float
) -> PairMetrics:
    """Measure everything except the divergence.

    dtype: dtype of single elements.
    zero: where |expected| <= zero, absolute errors do not count; nor does the distance if the norm is that small.
    """
    if expected.shape != actual.shape:
        raise ShapeMismatchError.of(actual, expected)
    totals = torch.zeros(6, dtype=torch.float64)
    largest = torch.zeros(2, dtype=torch.float64)
    count, num_nonfinite = 0, [0, 0]
    for block in zip(
        *(one.reshape(-1).split(BLOCK_ELEMENTS) for one in (expected, actual)), strict=True
    ):
        e, a = (one.to(dtype) for one in block)
        finite = e.isfinite(), a.isfinite()
        for side, one in enumerate(finite):
            num_nonfinite[side] += one.numel() - int(one.sum())
        if not bool((finite[0] & finite[1]).all()):
            e, a = (one[finite[0] & finite[1]] for one in (e, a))
        if not e.numel():
            continue
        relative = (a / e - 1).abs().masked_fill(e.abs() <= EPSILON, 0.0).double()
        absolute = (a - e).abs().masked_fill(e.abs() <= zero, 0.0).double()
        e, a = e.double(), a.double()
        terms = relative, absolute, (a - e).square(), e.square(), a.square(), e * a
        totals += torch.stack([term.sum() for term in terms])
        largest = torch.maximum(largest, torch.stack([relative.max(), absolute.max()]))
        count += e.numel()
    if not count:
        return PairMetrics(
            num_nonfinite_expected=num_nonfinite[0], num_nonfinite_actual=num_nonfinite[1]
        )
    difference, norm, other_norm = totals[2:5].sqrt().tolist()
    if norm and other_norm:
        cosine = max(-1.0, min(1.0, float(totals[5]) / (norm * other_norm)))
    else:
        cosine = 1.0 if norm == other_norm else 0.0
    distance = difference / norm if norm else math.inf
    if norm <= zero or not difference:
        distance = 0.0
    means = (totals / count).tolist()
    return PairMetrics(
        cosine, float(largest[0]), means[0], float(largest[1]), means[1], math.nan, distance,
        *num_nonfinite,
    )  # fmt: skip


def kl_divergences(expected_RC: Tensor, actual_RC: Tensor) -> Tensor:
    """Return KL(softmax(expected) || softmax(actual)) of each row in nats, (R,); nan for a row with NaN."""
    if not expected_RC.numel():
        return torch.zeros(0)
    num_rows = max(1, BLOCK_ELEMENTS // expected_RC.shape[1])
    blocks = zip(expected_RC.split(num_rows), actual_RC.split(num_rows), strict=True)
    return torch.cat([_divergences_of_rows(*block) for block in blocks])


def _divergences_of_rows(expected_RC: Tensor, actual_RC: Tensor) -> Tensor:
    sides = [one.split(BLOCK_ELEMENTS, dim=1) for one in (expected_RC, actual_RC)]
    logsumexp, other_logsumexp = (
        torch.stack([block.double().logsumexp(1) for block in side]).logsumexp(0) for side in sides
    )
    divergences = other_logsumexp - logsumexp
    for expected, actual in zip(*sides, strict=True):
        e = expected.double()
        p = (e - logsumexp[:, None]).exp()
        # A masked element, -inf, has the probability 0 and adds nothing.
        divergences += (p * (e - actual.double())).masked_fill(p == 0, 0.0).sum(1)
    return divergences.clamp(min=0.0)  # rounding


@dataclass(frozen=True, slots=True)
class CustomMetric:
    """A function `(golden, my) -> (value, message)`."""

    reference: str
    """FILE.py:FUNC."""
    name: str
    function: Callable[[Tensor, Tensor], object]

    def measure(self, expected: Tensor, actual: Tensor, where: str) -> tuple[Cell, str]:
        """Call the function with flat float32 copies of two tensors.

        where: the port, for messages.
        Raises: UsageError if the function fails.
        """
        golden, my = (one.reshape(-1).to(torch.float32, copy=True) for one in (expected, actual))
        try:
            found = self.function(golden, my)
        except (Exception, SystemExit) as error:
            what = f"raised for {where}: {raised_in_words(error)}"
            raise UsageError(f"--metric {self.reference} {what}") from error
        match found:
            case (Tensor() as value, str() as message) if value.numel() == 1:
                return float(value), message
            case ((Real() | str()) as value, str() as message):
                return value if isinstance(value, str) else float(value), message
        raise UsageError(
            f"--metric {self.reference} returned {found!r:.200} for {where};"
            " it must return a number or a text, and a message"
        )


def load_metrics(references: Sequence[str], taken: Collection[str]) -> list[CustomMetric]:
    """Import the functions of all --metric options.

    taken: names of other columns.
    Raises: UsageError if the import fails, UsageError if a column has the same name.
    """
    metrics: dict[str, CustomMetric] = {}
    for reference in references:
        _, name = find_plugin_file(reference)
        if name in taken or name in metrics:
            raise UsageError(f"--metric {reference}: there is a column {name}; rename the function")
        metrics[name] = CustomMetric(reference, name, load_object(reference))
    return list(metrics.values())


# Values of metrics by port and rank.
MetricValues = Mapping[tuple[Port, int], Mapping[Statistic, float]]


@dataclass(frozen=True, slots=True)
class TensorPair:
    """Two tensors at one port of the expected dump."""

    port: Port
    expected: DumpedTensor
    actual: DumpedTensor
    values: tuple[Tensor, Tensor] | None = None
    """Compared rows of actual and expected, (R, C); None for masks and pairs that were not compared."""
    reason: str = ""
    """The reason why the pair was not compared; "" if it was."""
    metrics: PairMetrics | None = None
    """None if the pair was not compared, or if no metrics are wanted."""
    custom: Sequence[tuple[Cell, str]] = ()
    """Value and message of each custom metric."""


def measure_pair(
    measure: MeasurePair, custom: Sequence[CustomMetric], pair: TensorPair
) -> TensorPair:
    """Return a pair with its metrics, without its values and access to them."""
    described = replace(
        pair, values=None, expected=pair.expected.described, actual=pair.actual.described
    )
    if pair.values is None:
        return described
    actual, expected = pair.values
    where = f"{pair.port} at step {pair.expected.site.at.step}"
    found = [one.measure(expected, actual, where) for one in custom]
    return replace(described, metrics=measure(expected, actual), custom=found)


def find_worst_values(pairs: Iterable[TensorPair]) -> MetricValues:
    """Return the worst value of each metric with a limit, by port and actual rank.

    Undefined metrics, as of an empty tensor, are left out.
    """
    worst = defaultdict[tuple[Port, int], dict[Statistic, float]](dict)
    for one in pairs:
        if one.metrics is None:
            continue
        values: dict[Statistic, float] = {"cosine-distance": 1 - one.metrics.cosine_similarity}
        if one.port.level == "logits":
            values["kl-divergence"] = one.metrics.kl_divergence
        known = worst[one.port, one.actual.site.at.rank]
        for name, value in values.items():
            if not math.isnan(value):
                known[name] = max(value, known.get(name, value))
    return worst
