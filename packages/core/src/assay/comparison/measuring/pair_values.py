"""The values of a pair of tensors: shapes and dtypes in which they compare, metrics, norms, coarser grids.

`measure_metrics` corrects the published formulas of metrics; `measure_as_published` keeps them. The published
formulas ignore absolute errors where the expected value is zero, take one softmax over the whole tensor instead
of one per row, give a tensor of zeros the distance 0 to any other tensor, and yield nothing for a tensor with a
NaN or an infinity.
Source: Ascend msit 8, components/llm, cmp_algorithm.py.

Shape legend: R rows (tokens), C channels (last dim).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real

import torch
from torch import Tensor

from assay.comparison.pairing.passes import PassPair, take_rows
from assay.comparison.pairing.port_series import Port, Series, SeriesByPort, SeriesPair
from assay.dumps.protocol import DumpedTensor
from assay.dumps.protocol import Statistic as DumpedStatistic
from assay.errors import UsageError, raised_in_words
from assay.judge.results import PortResult
from assay.kernel import WorstElement
from assay.metrics import ShapeMismatchError
from assay.output.tables import Cell
from assay.plugins import find_plugin_file, load_object
from assay.recording.recorders import NAMES, measure_statistics, take_values
from assay.sites import RowMap
from assay.statistics import Statistic, worst_error

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


class IncomparableError(Exception):
    """A pair of tensors that cannot be compared. Its text is the reason."""


class NotNeededError(IncomparableError):
    """A pair that need not be compared: other values show its errors, or it holds none of the tokens."""


def describe_shapes(value: Tensor, reference: Tensor) -> str:
    """Describe both shapes, as the reason why a pair is not compared."""
    return f"its shape is {list(value.shape)}, expected {list(reference.shape)}"


def take_both(
    pair: PassPair, value: Tensor, reference: Tensor
) -> tuple[Tensor, Tensor, RowMap | None] | None:
    """Return the rows of the paired tokens in both tensors, (R, 1, C), and their addresses."""
    expected = take_rows(reference, pair.expected, pair.expected_rows)
    actual = take_rows(value, pair.actual, pair.actual_rows)
    if expected is None or actual is None or not bool((expected[1] & actual[1]).any()):
        return None
    kept = expected[1] & actual[1]
    rows = pair.rows
    if rows is not None:
        numbers = kept.nonzero()[:, 0].tolist()
        rows = RowMap(
            tuple(rows.prompts[number] for number in numbers),
            tuple(rows.positions[number] for number in numbers),
        )
    return actual[0][kept], expected[0][kept], rows


def give_comparable(
    pair: PassPair | None, value: Tensor, reference: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Return the shared tokens of both tensors in one shape; None if the shapes are incompatible.

    pair: None for parameters, which must have the same shape.
    """
    if pair is None:
        return (value, reference) if value.shape == reference.shape else None
    if pair.expected_rows is None:
        if value.shape == reference.shape:
            return value, reference
        if (
            value.numel() == reference.numel()
            and (shaped := give_same_shape(value, reference)) is not None
        ):
            return shaped
    taken = take_both(pair.by_row(), value, reference)
    return taken[:2] if taken is not None and taken[0].shape == taken[1].shape else None


def expects_nothing(pair: PassPair, reference: Tensor) -> bool:
    """Return True if the expected tensor holds none of the paired tokens, as logits of the last token."""
    taken = take_rows(reference, pair.expected, pair.expected_rows)
    return taken is not None and not bool(taken[1].any())


def count_each(value: Tensor, reference: Tensor, rows: RowMap | None) -> tuple[Tensor, Tensor]:
    """Return integers with a last dim of 1, so that each value counts, and other tensors unchanged."""
    is_of_tokens = rows is not None and value.shape == (rows.num_rows, rows.length)
    if reference.is_floating_point() or is_of_tokens:
        return value, reference
    return value[..., None], reference[..., None]


def give_same_shape(value: Tensor, reference: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return both in one shape if only their leading dims differ; else None."""
    if value.numel() == reference.numel() and value.shape[-1:] == reference.shape[-1:]:
        return value.reshape(reference.shape), reference
    if 1 in (*value.shape[:1], *reference.shape[:1]):
        try:
            value, reference = torch.broadcast_tensors(value, reference)
        except RuntimeError:
            return None
        return value, reference
    return None


def give_one_shape(
    pair: PassPair, value: Tensor, reference: Tensor, rows: RowMap | None
) -> tuple[Tensor, Tensor, RowMap | None]:
    """Return the values of the paired tokens in one shape, by their leading dims or by token, and their rows.

    rows: the rows of both, if all tokens are paired.
    Raises: NotNeededError if EXPECTED holds none of the tokens; IncomparableError if the tokens are unknown, or
        for incompatible shapes.
    """
    if pair.expected_rows is not None:
        taken = take_both(pair, value, reference)
        if taken is None and expects_nothing(pair, reference):
            raise NotNeededError("it holds none of these tokens")
        if taken is None:
            raise IncomparableError("its tokens are unknown")
        value, reference, rows = taken
    if value.shape == reference.shape:
        return value, reference, rows
    # All prompts share a single row only if both sides have the same prompts.
    may_broadcast = pair.expected.shape == pair.actual.shape or value.numel() == reference.numel()
    if (shaped := give_same_shape(value, reference)) is not None and may_broadcast:
        return *shaped, rows
    taken = take_both(pair.by_row(), value, reference)
    if taken is not None and taken[0].shape == taken[1].shape:
        return taken
    raise IncomparableError(describe_shapes(value, reference))


def coarsest_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the narrowest dtype; of float16 and bfloat16, bfloat16."""
    return min(dtypes, key=lambda one: (one.itemsize, str(one)))


def give_comparable_dtype(value: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Return actual unchanged and expected in the wider dtype."""
    if reference.is_floating_point() != value.is_floating_point():
        return value.double(), reference.double()
    if reference.is_floating_point():
        return value, reference.to(torch.promote_types(value.dtype, reference.dtype))
    return value, reference


def relative_difference(value: Tensor, reference: Tensor) -> float:
    """Return ||value - reference|| / ||reference||, at most 1; for integers the share that differs."""
    if not (value.is_floating_point() and reference.is_floating_point()):
        return float((value != reference).double().mean()) if value.numel() else 0.0
    value, reference = value.double(), reference.double()
    error = float(torch.linalg.vector_norm(value - reference))
    size = float(torch.linalg.vector_norm(reference))
    if not error:
        return 0.0
    return min(1.0, error / size) if size and math.isfinite(error) else 1.0


def find_first_step(matched: SeriesPair) -> int:
    """Return the first step in which both sides hold a parameter; 0 without one."""
    steps = [
        {step for _, step, _ in series.tensors} for series in (matched.expected, matched.actual)
    ]
    return min(steps[0] & steps[1], default=0)


def distinct_weights(
    series: Series, first_step: int
) -> dict[tuple[int, int], list[list[DumpedTensor]]]:
    """Return the first tensors of each micro-batch, for every group of ranks that holds copies.

    Tools write a parameter again in every call. Weights from before `first_step` are left out.
    """
    found: dict[tuple[int, int], dict[tuple[int, ...], list[DumpedTensor]]] = {}
    for key, tensors in series.tensors.items():
        # A generation does not change weights. In training, the weights of later steps result from updates.
        is_weight = series.port.phase == "forward"
        if is_weight and key[1] < first_step:
            continue
        writers = tuple(one.writer for one in tensors) if is_weight else ()
        found.setdefault((0, 0) if is_weight else key[:2], {}).setdefault(writers, tensors)
    return {key: list(copies.values()) for key, copies in found.items()}


def compare_copies(copies: Sequence[list[DumpedTensor]]) -> Iterator[tuple[int, float]]:
    """Yield the rank of each copy of a parameter, and its difference from the first copy."""
    for copy in copies[1:]:
        for one, first in zip(copy, copies[0], strict=False):
            if one.has_values and first.has_values and one.shape == first.shape:
                value, reference = one.read_intact(), first.read_intact()
                error = math.inf  # the file is damaged
                if value is not None and reference is not None:
                    error = relative_difference(value, reference)
                yield one.writer, error


def measure_parameter(
    result: PortResult, value: Tensor, reference: Tensor
) -> tuple[Tensor, Tensor]:
    """Add a parameter to `result`. If the dtypes differ, the wider side is rounded first.

    The position of the worst element is its row.
    Returns: the compared rows of both, (R, C).
    """
    coarser = coarsest_dtype(value.dtype, reference.dtype)
    value, reference = value.to(coarser), reference.to(coarser)
    width = reference.shape[-1] if reference.ndim > 1 else 1
    value, reference = value.reshape(-1, width), reference.reshape(-1, width)
    same = None
    if not torch.equal(value, reference):
        same = (value == reference) | (value.isnan() & reference.isnan())
    num_different = 0 if same is None else same.numel() - int(same.count_nonzero())
    result.exact.add(value.numel(), num_different)
    if not reference.is_floating_point():
        value, reference = value.double(), reference.double()
    row = torch.arange(len(reference))
    result.sums.add(value, reference, torch.full_like(row, -1), row)
    if same is not None and (result.sums.num_nan or result.sums.num_inf):
        # The sums exclude values that are not finite. The first one is the worst element.
        wrong = (~same & ~value.isfinite()).nonzero()[:1].tolist()
        for at, channel in wrong:
            values = float(value[at, channel]), float(reference[at, channel])
            result.sums.worst = WorstElement(math.inf, *values, (-1, at, channel))
    return value, reference


# The most elements of an update whose gradient may be pure noise, and the fewest elements per such element.
_FEW_FLIPS = 3
_ELEMENTS_FOR_FLIP = 64
# A gradient of pure noise moves its parameter by up to the learning rate, in either direction. Smaller
# differences than half of that belong to all elements alike, such as those of another learning rate.
_FLIP_SIZES = (0.5, 2.0)


def excuse_sign_flips(update: Tensor, reference: Tensor) -> tuple[Tensor, int]:
    """Return `reference` with the values of `update` in the few elements that may have any sign.

    Adam divides a gradient by its size. In a small tensor, one element of random sign is 1% of the update.

    Returns: also the number of such elements.
    """
    num_flips = min(_FEW_FLIPS, update.numel() // _ELEMENTS_FOR_FLIP)
    if not num_flips or not bool(update.isfinite().all()):
        return reference, 0
    worst, index = (update - reference).abs().flatten().topk(num_flips)
    low, high = (size * reference.abs().max() for size in _FLIP_SIZES)
    index = index[(worst > low) & (worst <= high)]
    excused = reference.flatten().clone()
    excused[index] = update.flatten()[index]
    return excused.view_as(reference), len(index)


def read_norms(tensor: DumpedTensor) -> Mapping[DumpedStatistic, float] | None:
    """Return the recorded statistics of a tensor, or measure its values; None without a norm."""
    if not tensor.has_values:
        return tensor.statistics if "norm" in tensor.statistics else None
    value = tensor.read_intact()
    if value is None:
        return None
    if not value.is_floating_point() or not value.numel():
        return {"norm": float(torch.linalg.vector_norm(value, dtype=torch.float64))}
    found = measure_statistics(value)
    return dict(zip(NAMES, take_values([found])[id(found)].tolist(), strict=True))


def compare_norms(
    actual: Mapping[DumpedStatistic, float], expected: Mapping[DumpedStatistic, float]
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


# Numbers of sampled rows, and of sampled values in each.
_NUM_ROWS, _WIDTH = 32, 64
_LEAST_WIDTH = 32
# Of 64 normal values, rounding to 8 bits leaves 82% distinct (the largest value at 2.5 deviations), fp8
# 60% and 4 bits 25%. Both sides are first rounded to the coarser dtype of the two.
_MOST_DISTINCT = 0.9
# If both sides have fewer distinct values, the dtype itself is coarse.
_FEWEST_DISTINCT = 0.5
# Rounding to 3 bits causes a relative error of 0.2. Larger errors are not quantization.
_MOST_ERROR = 0.3
# Rounding to 8 bits, relative to the largest value. Smaller differences are not quantization.
_LEAST_DIFFERENCE = 2.0**-10


@dataclass(frozen=True, slots=True)
class Coarseness:
    """The share of distinct values in a row, on both sides."""

    actual: float
    expected: float

    @property
    def side(self) -> str:
        """Return the side with coarser values; "" for neither or both."""
        if max(self.actual, self.expected) < _FEWEST_DISTINCT:
            return ""
        if self.actual <= _MOST_DISTINCT * self.expected:
            return "ACTUAL"
        return "EXPECTED" if self.expected <= _MOST_DISTINCT * self.actual else ""


def measure_coarseness(
    value: Tensor, reference: Tensor, stored: Sequence[torch.dtype] = ()
) -> Coarseness | None:
    """Count the distinct values of two tensors, (R, C). Zeros do not count: they have other causes.

    stored: the dtypes in the dumps.
    Returns: None if the values agree, differ by more than quantization, or are too narrow.
    """
    dtype = coarsest_dtype(value.dtype, reference.dtype, *stored)
    is_wide = value.ndim == 2 and value.shape[-1] >= _LEAST_WIDTH and len(value) > 0
    if not (dtype.is_floating_point and is_wide):
        return None
    step = max(1, len(value) // _NUM_ROWS)
    actual, expected = (
        one[::step][:_NUM_ROWS, :_WIDTH].to(dtype).double() for one in (value, reference)
    )
    error = actual - expected
    is_close = torch.linalg.vector_norm(error) <= _MOST_ERROR * torch.linalg.vector_norm(expected)
    if not bool(is_close & (error.abs().amax() > _LEAST_DIFFERENCE * expected.abs().amax())):
        return None
    return Coarseness(_distinct_part(actual), _distinct_part(expected))


def _distinct_part(rows: Tensor) -> float:
    """Return the share of distinct values per row, without zeros."""
    count = int(rows.count_nonzero())
    is_new = torch.ones_like(rows, dtype=torch.bool)
    ordered = rows.sort(-1).values
    is_new[:, 1:] = ordered.diff(dim=-1) != 0
    return int((is_new & (ordered != 0)).sum()) / count if count else 1.0


# Storage dtypes of quantized weights. int64 is left out: counters have it.
_STORED = ("int8", "uint8", "int32", "float8")


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """A module that only one side quantizes."""

    module: str
    side: str
    """EXPECTED or ACTUAL."""
    sign: str
    """The evidence, in words."""


def find_quantized_layers(
    expected: SeriesByPort,
    actual: SeriesByPort,
    pairs: list[SeriesPair],
    coarse: Mapping[Port, Coarseness],
) -> list[QuantizedLayer]:
    """Return the modules whose weights or results are quantized on one side only, in order.

    coarse: ports whose values lie on a coarser grid on one side.
    """
    stored = [
        {
            port.module: series.first.dtype
            for port, series in series_of.items()
            if (port.direction, port.phase) == ("parameter", "forward")
            and series.first.dtype.startswith(_STORED)
        }
        for series_of in (expected, actual)
    ]
    found: dict[str, QuantizedLayer] = {}
    for pair in pairs:
        names = pair.expected.port.module, pair.actual.port.module
        dtypes = [known.get(name) for known, name in zip(stored, names, strict=True)]
        port = pair.port
        if bool(dtypes[0]) != bool(dtypes[1]):
            side = "EXPECTED" if dtypes[0] else "ACTUAL"
            sign = f"its weight is stored as {dtypes[0] or dtypes[1]}"
        elif port in coarse:
            distinct = coarse[port]
            side = distinct.side
            what = "weights" if port.direction == "parameter" else "results"
            sign = (
                f"{distinct.actual:.0%} of the {what} in a row are distinct, expected"
                f" {distinct.expected:.0%}"
            )
        else:
            continue
        found.setdefault(port.module, QuantizedLayer(port.module, side, sign))
    return list(found.values())
