"""Comparing all weights of two model folders, one weight at a time."""

from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from assay.models.quantization.folding import Factors, block_of, explain_factors, fit_factors
from assay.models.quantization.formats.protocol import Format
from assay.models.quantization.judging import JudgedWeight, deviations_allowed
from assay.models.quantization.matching import Pair, count_groups, list_weights, match_weights
from assay.models.quantization.measuring import measure_groups
from assay.models.quantization.plain import compare_plain
from assay.models.quantization.quantized_weight import QuantizedWeight
from assay.models.quantization.results import Finding, Place, WeightComparison, WeightResult
from assay.models.quantization.stored import StoredWeights
from assay.progress import counted

_MOST_LISTED = 100


def compare_weights(expected: StoredWeights, actual: StoredWeights) -> WeightComparison:
    """Compare every weight of `expected` with its partner in `actual`; either may be quantized.

    Where only `expected` is quantized, it is judged by `actual`: the float weights are the truth.
    Raises: UsageError, naming file and key, for weights that cannot be read.
    """
    sides = _Sides(expected, actual)
    matched = match_weights(sides.of_expected, sides.of_actual)
    results: dict[str, WeightResult] = {}
    tasks: dict[str, _Task] = {}
    not_compared: list[str] = []
    for pair in counted("compares weights", matched.pairs, "weights"):
        for task in sides.tasks(pair):
            tasks[task.name] = task
            try:
                results[task.name] = sides.compare(task)
            except _ShapeError as error:
                not_compared.append(str(error))
    results |= _explain(sides, results, tasks)
    findings = sorted(_findings(list(results.values())), key=lambda one: -one.ratio)
    return WeightComparison(
        tuple(results.values()),
        tuple(findings[:_MOST_LISTED]),
        matched.unmatched_expected,
        matched.unmatched_actual,
        tuple(not_compared),
    )


class _ShapeError(ValueError):
    """Two weights of different shapes."""


@dataclass(frozen=True)
class _Task:
    """One actual weight, and the expected ones whose rows it holds."""

    name: str
    expected: tuple[str, ...]
    actual: str
    first_row: int | None = None
    """First of its rows in the expected weight, if it is a part of that."""


class _Sides:
    """Both folders, with the format of each weight."""

    def __init__(self, expected: StoredWeights, actual: StoredWeights) -> None:
        self.expected, self.actual = expected, actual
        self.of_expected, self.of_actual = list_weights(expected), list_weights(actual)
        self.limit = deviations_allowed(
            count_groups(actual, self.of_actual) or count_groups(expected, self.of_expected)
        )

    def tasks(self, pair: Pair) -> list[_Task]:
        """Divide a pair into single actual weights."""
        if len(pair.actual) == 1:
            return [_Task(" + ".join(pair.expected), pair.expected, pair.actual[0])]
        row, tasks = 0, []
        for name in pair.actual:
            tasks.append(_Task(name, pair.expected, name, row))
            row += _num_rows(_load(self.actual, name, self.of_actual[name]))
        return tasks

    def compare(self, task: _Task, factors: Factors | None = None) -> WeightResult:
        """Compare one actual weight. factors: what its expected rows and columns are multiplied by."""
        judged, reference = self.load(task)
        file = self.actual.files.get(self._stored_name(task.actual), self.actual.origin).name
        if 0 in _shape(judged):
            return WeightResult(task.name, file, 0, 0.0, 0.0, 0.0)
        if isinstance(judged, Tensor):
            if isinstance(reference, Tensor):
                return compare_plain(task.name, file, reference, judged)
            judged, reference = reference, judged  # a float weight in a quantized folder
        values = _values(reference)
        values = factors.apply(values) if factors is not None else values
        is_exact = factors is None or factors.is_exact
        errors = measure_groups(judged, values, is_exact=is_exact)
        return JudgedWeight(task.name, file, judged, values, errors, self.limit).judge()

    def load(self, task: _Task) -> tuple[Tensor | QuantizedWeight, Tensor | QuantizedWeight]:
        """Read the judged weight and its reference. Raises: _ShapeError if they differ in shape."""
        actual = _load(self.actual, task.actual, self.of_actual[task.actual])
        parts = [_load(self.expected, one, self.of_expected[one]) for one in task.expected]
        expected = parts[0]
        if len(parts) > 1:
            expected = torch.cat([_values(one) for one in parts])
        shape = _shape(actual)
        if task.first_row is not None:
            expected = _values(expected)[task.first_row : task.first_row + _num_rows(actual)]
        if _shape(expected) != shape:
            raise _ShapeError(f"{task.name} (expected {_shape(expected)}, actual {shape})")
        return (expected, actual) if self._is_reversed else (actual, expected)

    @property
    def _is_reversed(self) -> bool:
        return bool(self.expected.quantization) and not self.actual.quantization

    def _stored_name(self, name: str) -> str:
        form = self.of_actual[name]
        return name if form is None else f"{name.removesuffix('weight')}{form.marker}"


def _load(stored: StoredWeights, name: str, form: Format | None) -> Tensor | QuantizedWeight:
    if form is None:
        return stored.read(name)
    return form.read(stored, name.removesuffix(".weight"))


def _values(weight: Tensor | QuantizedWeight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantize()


def _shape(weight: Tensor | QuantizedWeight) -> tuple[int, ...]:
    return tuple(weight.shape) if isinstance(weight, Tensor) else weight.groups.weight_shape


def _num_rows(weight: Tensor | QuantizedWeight) -> int:
    return next(iter(_shape(weight)), 0)


def _explain(
    sides: _Sides, results: dict[str, WeightResult], tasks: dict[str, _Task]
) -> dict[str, WeightResult]:
    """Compare weights once more whose rows or columns were scaled in a way that others take back."""
    blocks = {
        block_of(name) for name, one in results.items() if one.findings and one.num_groups == 1
    }
    fitted: dict[str, Factors] = {}
    for name, result in results.items():
        if result.findings or block_of(name) in blocks:
            judged, reference = sides.load(tasks[name])
            if len(_shape(judged)) in (1, 2):
                fitted[name] = fit_factors(_values(reference), _values(judged))
    found = {}
    for name, factors in explain_factors(fitted).items():
        result = results[name].rescaled()
        if len(factors.columns):
            result = replace(sides.compare(tasks[name], factors), is_rescaled=True)
        if factors.apart:
            place = Place(range(min(factors.apart), max(factors.apart) + 1), ())
            finding = Finding(name, "values", results[name].error, results[name].best, place)
            result = replace(result, findings=(finding, *result.findings))
        found[name] = result
    return {name: one for name, one in found.items() if not one.is_other}


def _findings(results: list[WeightResult]) -> list[Finding]:
    """Return all findings; those of a shard of which most weights are others become one."""
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
        found.append(Finding(file, "shard", worst.error, worst.best, amount=others[file]))
    return found
