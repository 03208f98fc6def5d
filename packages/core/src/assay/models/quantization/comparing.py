"""Compare all weights of two model folders, one weight at a time.

Quantizers such as AWQ and SmoothQuant move scales from one weight to the next. They divide a norm's weight,
or a linear's rows, by a factor per channel, and multiply the columns of the linears that read these channels
by it. The model's output stays the same.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import NormalDist

import torch
from torch import Tensor

from assay.models.quantization.judging import (
    Cause,
    JudgedWeight,
    WeightComparison,
    WeightFault,
    WeightRegion,
    WeightResult,
    deviations_allowed,
)
from assay.models.quantization.measuring import measure_groups
from assay.models.quantization.quantized_weight import QuantizedWeight
from assay.models.quantization.stored_weights import (
    ContradictionError,
    Format,
    WeightStore,
    require_included,
)
from assay.models.quantization.weight_formats import count_groups, find_left_out, list_weights
from assay.progress import counted
from assay.sites import strip_model_prefixes

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


_MOST_LISTED = 100
_CHUNK_ELEMENTS = 1 << 22

# Two tensors differ by a factor if fitting one leaves less than this part of their squared difference.
_MOST_REMAINING = 0.05

# Modules that hold the rows of several others, in order.
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "W_pack": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


@dataclass(frozen=True)
class _Pair:
    """One actual weight, and the expected weights whose rows it holds."""

    expected: tuple[str, ...]
    actual: str
    parts: tuple[str, ...] = ()
    """All actual weights that share the rows of the expected one, in order; empty if it is one weight."""

    @property
    def name(self) -> str:
        """Return the name in results."""
        return self.actual if self.parts else " + ".join(self.expected)


def compare_weights(expected: WeightStore, actual: WeightStore) -> WeightComparison:
    """Compare every weight of `expected` with its partner in `actual`; either may be quantized.

    If only `expected` is quantized, it is judged against the float weights of `actual`.
    Raises: UsageError, naming file and key, for unreadable weights.
    """
    sides = _Sides(expected, actual)
    pairs, left_expected, left_actual = _match_weights(sides.of_expected, sides.of_actual)
    results: dict[str, WeightResult] = {}
    not_compared = find_left_out(actual, sides.of_actual)
    for pair in counted("compares weights", pairs, "weights"):
        try:
            results[pair.name] = sides.compare(pair)
        except (_ShapeError, ContradictionError) as error:
            not_compared.append(str(error))
    results |= _explain(sides, results, {pair.name: pair for pair in pairs})
    findings = sorted(_findings(list(results.values())), key=lambda one: -one.ratio)
    return WeightComparison(
        tuple(results.values()),
        tuple(findings[:_MOST_LISTED]),
        tuple(left_expected),
        tuple(left_actual),
        tuple(not_compared),
    )


class _ShapeError(ValueError):
    """Error for two weights of different shapes."""


def _match_weights(
    expected: Iterable[str], actual: Iterable[str]
) -> tuple[list[_Pair], list[str], list[str]]:
    """Match names without implementations' prefixes, and fused weights with their parts.

    Returns: the pairs, and the unmatched expected and actual names.
    """
    of_expected = {strip_model_prefixes(name): name for name in expected}
    of_actual = {strip_model_prefixes(name): name for name in actual}
    both = [key for key in of_expected if key in of_actual]
    pairs = [_Pair((of_expected.pop(key),), of_actual.pop(key)) for key in both]
    pairs += [_Pair(parts, whole) for whole, parts in _take_fused(of_actual, of_expected)]
    for whole, parts in _take_fused(of_expected, of_actual):
        pairs += [_Pair((whole,), part, parts) for part in parts]
    return pairs, list(of_expected.values()), list(of_actual.values())


def _take_fused(wholes: dict[str, str], parts: dict[str, str]) -> list[tuple[str, tuple[str, ...]]]:
    """Remove fused weights and their parts from the unmatched names, and return them."""
    found = []
    for key in list(wholes):
        module, _, kind = key.rpartition(".")
        parent, _, last = module.rpartition(".")
        keys = [f"{parent}.{name}.{kind}" for name in _FUSED.get(last, ())]
        if keys and all(one in parts for one in keys):
            found.append((wholes.pop(key), tuple(parts.pop(one) for one in keys)))
    return found


class _Sides:
    """Both folders with the format of each weight."""

    def __init__(self, expected: WeightStore, actual: WeightStore) -> None:
        self.expected, self.actual = expected, actual
        self.of_expected, self.of_actual = list_weights(expected), list_weights(actual)
        self.limit = deviations_allowed(
            count_groups(actual, self.of_actual) or count_groups(expected, self.of_expected)
        )

    def compare(self, pair: _Pair, factors: Factors | None = None) -> WeightResult:
        """Compare one actual weight.

        factors: factors of the rows and columns of the expected weight.
        """
        judged, reference = self.load(pair)
        form, name = self.of_actual[pair.actual], pair.actual
        stored_name = name if form is None else f"{name.removesuffix('weight')}{form.marker}"
        file = self.actual.files.get(stored_name, self.actual.origin).name
        if 0 in _shape(judged):
            return WeightResult(pair.name, file, 0, 0.0, 0.0, 0.0)
        if isinstance(judged, Tensor):
            if isinstance(reference, Tensor):
                noise = _PLUS_ONE if pair.actual in self.actual.plus_one else 0.0
                return _compare_plain(pair.name, file, reference, judged, noise)
            judged, reference = reference, judged  # a float weight in a quantized folder
        values = _values(reference)
        values = factors.apply(values) if factors is not None else values
        is_exact = factors is None or factors.is_exact
        roundoff = self._roundoff(reference)
        errors = measure_groups(judged, values, roundoff=roundoff, is_exact=is_exact)
        judge = JudgedWeight(pair.name, file, judged, values, errors, self.limit, roundoff)
        result, across = judge.judge(), judged.groups.grid_shape[1]
        if factors is not None and bool(factors.rows.ne(1).any()) and across > 1:
            # The factor fitted to a row holds one share of a wrong scale in it.
            result = replace(result, resolution=result.resolution * across / (across - 1))
        return result

    def _roundoff(self, reference: Tensor | QuantizedWeight) -> float:
        """Return the unit roundoff of the coarsest dtype in which a quantizer may have computed."""
        dtypes = [reference.dtype] if isinstance(reference, Tensor) else [torch.float32]
        dtypes += [
            one.dtype for one in (self.expected, self.actual) if one.quantization and one.dtype
        ]
        return max(float(torch.finfo(one).eps) for one in dtypes) / 2

    def load(self, pair: _Pair) -> tuple[Tensor | QuantizedWeight, Tensor | QuantizedWeight]:
        """Read the judged weight and its reference. Raises: _ShapeError if they differ in shape."""
        actual = _load(self.actual, pair.actual, self.of_actual[pair.actual])
        parts = [_load(self.expected, one, self.of_expected[one]) for one in pair.expected]
        expected = parts[0]
        if len(parts) > 1:
            expected = torch.cat([_values(one) for one in parts])
        shape = _shape(actual)
        if pair.parts:
            before = pair.parts[: pair.parts.index(pair.actual)]
            row = sum(_num_rows(_load(self.actual, one, self.of_actual[one])) for one in before)
            expected = _values(expected)[row : row + _num_rows(actual)]
        if isinstance(expected, Tensor) and expected.dim() == len(shape) + 1:
            expected = expected.mT.flatten(0, 1)  # experts [experts, inputs, outputs] as rows
        if _shape(expected) != shape:
            raise _ShapeError(f"{pair.name} (expected {_shape(expected)}, actual {shape})")
        if self.expected.quantization and not self.actual.quantization:
            return expected, actual
        return actual, expected


def _load(stored: WeightStore, name: str, form: Format | None) -> Tensor | QuantizedWeight:
    if form is None:
        return stored.read(name)
    module = name.removesuffix(".weight")
    require_included(stored, module)
    return form.read(stored, module)


def _values(weight: Tensor | QuantizedWeight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantize()


def _shape(weight: Tensor | QuantizedWeight) -> tuple[int, ...]:
    return tuple(weight.shape) if isinstance(weight, Tensor) else weight.groups.weight_shape


def _num_rows(weight: Tensor | QuantizedWeight) -> int:
    return next(iter(_shape(weight)), 0)


def _explain(
    sides: _Sides, results: dict[str, WeightResult], pairs: dict[str, _Pair]
) -> dict[str, WeightResult]:
    """Compare weights again without the row and column scales that other weights cancel."""
    layers = {
        layer_of(name) for name, one in results.items() if one.findings and one.num_groups == 1
    }
    fitted: dict[str, Factors] = {}
    for name, result in results.items():
        if result.findings or layer_of(name) in layers:
            judged, reference = sides.load(pairs[name])
            if len(_shape(judged)) in (1, 2):
                fitted[name] = fit_factors(_values(reference), _values(judged))
    found = {}
    for name, factors in explain_factors(fitted).items():
        result = replace(results[name], findings=(), is_other=False, is_rescaled=True)
        if len(factors.columns):
            result = replace(sides.compare(pairs[name], factors), is_rescaled=True)
        if factors.apart:
            place = WeightRegion(range(min(factors.apart), max(factors.apart) + 1), ())
            finding = WeightFault(name, "values", results[name].error, results[name].best, place)
            result = replace(result, findings=(finding, *result.findings))
        found[name] = result
    return {name: one for name, one in found.items() if not one.is_other}


def _findings(results: list[WeightResult]) -> list[WeightFault]:
    """Return all faults; merge those of a stale shard, most of whose weights are other weights."""
    total, others = Counter(one.file for one in results), Counter(
        one.file for one in results if one.is_other
    )  # fmt: skip
    stale = {
        file for file, count in others.items()
        if count > 1 and 2 * count > total[file] and others.keys() == {file} and len(total) > 1
    }  # fmt: skip
    found = [one for result in results if result.file not in stale for one in result.findings]
    for file in stale:
        inside = [one for result in results if result.file == file for one in result.findings]
        worst = max(inside, key=lambda one: one.ratio)
        found.append(WeightFault(file, "shard", worst.error, worst.best, amount=others[file]))
    return found


# Relative and absolute error that storing 1 + w in float32 leaves in w, at most.
_PLUS_ONE = float(torch.finfo(torch.float32).eps)


def _compare_plain(
    name: str, file: str, expected: Tensor, actual: Tensor, noise: float
) -> WeightResult:
    """Compare two tensors of one shape; allow the rounding of the coarser dtype if the dtypes differ.

    noise: the relative and absolute error that is allowed anyway.
    """
    dtypes = [one.dtype for one in (expected, actual)]
    is_float = all(one.is_floating_point for one in dtypes)
    rounding = smallest = noise
    if dtypes[0] != dtypes[1] and is_float:
        facts = [torch.finfo(one) for one in dtypes]
        rounding = max(noise, *(one.eps / 2 for one in facts))
        smallest = max(noise, *(one.smallest_normal * one.eps for one in facts))
    num_rows, row_size = (
        (len(expected), expected[0].numel()) if expected.dim() and len(expected) else (1, 1)
    )
    squares = errors = products = 0.0
    different = 0
    rows: list[Tensor] = []
    step = max(1, _CHUNK_ELEMENTS // max(1, row_size))
    for start in range(0, num_rows, step):
        want, have = (
            one.reshape(num_rows, -1)[start : start + step].double() for one in (expected, actual)
        )
        differs = ~torch.isclose(have, want, rtol=rounding, atol=smallest, equal_nan=True)
        different += int(differs.sum())
        rows.append(differs.any(1).nonzero()[:, 0] + start)
        squares += float(want.square().sum())
        errors += float((have - want).square().sum())
        products += float((want * (have - want)).sum())
    error = (errors / squares) ** 0.5 if squares else float("inf") if errors else 0.0
    if not different:
        return WeightResult(name, file, 1, error, rounding, 0.0)
    slope = products / squares if squares else 0.0
    is_factor = errors - slope * products < _MOST_REMAINING * errors
    cause: Cause = "scale" if is_factor else "values"
    wrong = torch.cat(rows)
    place = WeightRegion(range(int(wrong[0]), int(wrong[-1]) + 1), ())
    finding = WeightFault(name, cause, error, rounding, place, 1 + slope if is_factor else 0.0)
    is_other = 2 * different > expected.numel()
    return WeightResult(
        name, file, 1, error, rounding, finding.ratio, findings=(finding,), is_other=is_other
    )
