"""Find the wrong groups of one weight from their measured errors, and name the cause; the results of a comparison."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import NormalDist
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from assay.models.quantization.measuring import GroupErrors
from assay.models.quantization.quantized_weight import QuantizedWeight

Cause = Literal[
    "scale",  # a scale is `amount` times the right one
    "zero-point",  # a zero point is `amount` steps too large
    "swapped",  # the values belong to the group at `partner`
    "swapped-parameters",  # scale and zero point belong to the group at `partner`
    "values",  # none of these
    "shard",  # most weights of one file belong to another model
]


@dataclass(frozen=True)
class WeightRegion:
    """Rows and columns of a weight."""

    rows: range
    columns: tuple[int, ...]


@dataclass(frozen=True)
class WeightFault:
    """One fault of a group, a weight or a file."""

    weight: str
    """Name in EXPECTED; the file's name for a shard."""
    cause: Cause
    error: float
    """Relative error, ||actual - expected|| / ||expected||."""
    best: float
    """Best relative error of the format for these weights."""
    place: WeightRegion | None = None
    """None for the whole weight."""
    amount: float = 0.0
    """Factor or steps, depending on `cause`; for a shard, the number of its wrong weights."""
    partner: WeightRegion | None = None

    @property
    def ratio(self) -> float:
        """Divide the error by the best error."""
        return self.error / self.best if self.best else (float("inf") if self.error else 0.0)


@dataclass(frozen=True)
class WeightResult:
    """One compared weight."""

    name: str
    """Name in EXPECTED."""
    file: str
    num_groups: int
    error: float
    """Median relative error of the groups."""
    best: float
    """Median best error of the groups."""
    worst_ratio: float
    """Largest ratio of a group's error to its best error."""
    resolution: float = 0.0
    """Relative error from which on a wrong scale is found, in 95 % of the groups."""
    findings: tuple[WeightFault, ...] = ()
    """Worst first."""
    is_other: bool = False
    """Most of it differs."""
    is_rescaled: bool = False
    """Its rows or columns were scaled, and another weight of its layer cancels that."""


@dataclass(frozen=True)
class WeightComparison:
    """All weights of two folders."""

    results: tuple[WeightResult, ...]
    findings: tuple[WeightFault, ...]
    """Worst first. The faults of a stale shard are merged."""
    unmatched_expected: tuple[str, ...] = ()
    unmatched_actual: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = field(default=())
    """Weights with different shapes, with the reason."""

    @property
    def num_groups(self) -> int:
        """Count the compared groups."""
        return sum(result.num_groups for result in self.results)


# The probability of a false alarm in a comparison of correct weights, over all groups, if slope and
# offset were normal.
_FALSE_ALARMS = 1e-3
# Their tails are heavier than normal. Measured: at most 5.9 in 120 quantizations by AutoGPTQ's algorithm
# (352,768 groups; 2, 3, 4 and 8 bits; groups of 32 to 128 and whole rows; normal weights, Student's t with
# 4 degrees of freedom, 8 weights of all-MiniLM-L6-v2), at most 5.3 in 240 by exact rounding (1,005,568).
_HEAVY_TAIL = 1.25
_LEAST_DEVIATIONS = 6.5
# Enough to name the cause for a group that is known to be wrong.
_FEWEST_DEVIATIONS = 3.0

# A slope so many standard deviations above the limit exceeds it in 98 of 100 groups.
_POWER = 2.0
# The resolution holds for this part of the groups.
_SHARE_OF_GROUPS = 0.95

# A zero point is an integer, so an error is at least half a step.
_LEAST_STEPS = 0.5

# Error of a group over the larger of its best error and the weight's median error. Measured: at most 5.1
# for exact rounding (a group of nearly equal values), 26 for GPTQ (8 bits, columns next to outliers).
_MOST_OVER_BEST = 10.0
_MOST_OVER_BEST_OF_GPTQ = 40.0
# Median error over median best. Measured: at most 1.4 (exact rounding) and 2.7 (GPTQ, whole rows).
_MOST_OVER_MEDIAN = 4.0

# Squared code errors of a part of a row over the usual ones of its columns. Measured: at most 3.7 for exact
# rounding in the model's dtype, 10 for GPTQ (GPTQModel 7.7, 4 bits, groups of 32); at least 44 where a
# quarter of a group's 4-bit codes is random.
_MOST_OVER_PARTS = 8.0
_MOST_OVER_PARTS_OF_GPTQ = 25.0

# Error of a group over that of random codes. Measured for GPTQ: at most 0.43, 0.22, 0.11 and 0.01 at 2, 3,
# 4 and 8 bits, and a median of 0.24 at 2 bits (groups of 32 to 256). Random codes: 1, with a standard
# deviation of at most 0.1 in groups of 32.
_MOST_OF_RANDOM = 0.6
# GPTQ may move the values of some columns by more, in all rows alike: then so much over their median.
_MOST_OVER_USUAL = 2.5
# Cosine below which values that are as wrong as random ones are random in all rows.
_LEAST_SIMILAR_TO_EXPECTED = 0.3

# Slope that GPTQ leaves on coarse grids, as a multiple of the squared best error, because it cannot
# compensate beyond the range. Measured: at most 1.4 in the median of a weight (2 bits).
_MOST_BENT = 2.0
# Median slope of a weight with all scales wrong. Measured in correct weights: at most 0.01 at 4 bits.
_LEAST_COMMON_SLOPE = 0.03

# A group this similar to another group's expected values holds these values. For unrelated groups of 32
# values, P(cos > 0.85) = 5e-9.
_LEAST_SIMILAR = 0.85
# Coarse grids lower the similarity of correct groups; then the limit is this part of the median.
_PART_OF_MEDIAN = 0.9
# Below this median similarity, it is another weight. Measured: at least 0.67 (GPTQ, 2 bits).
_LEAST_SIMILAR_IN_MEDIAN = 0.5
# A group unlike its expected values is searched elsewhere if its error is this large.
_LEAST_OVER_BEST = 2.0
# Groups to search for, worst first. Each costs a pass over the weight.
_MOST_SEARCHED = 16
_MOST_LISTED = 100

# Scales within this relative distance plus three standard deviations may be the same.
_SAME_SCALE = 0.02


def deviations_allowed(num_groups: int) -> float:
    """Return the limit in standard deviations for this many groups."""
    probability = _FALSE_ALARMS / max(1, num_groups) / 2
    return max(_LEAST_DEVIATIONS, -_HEAVY_TAIL * NormalDist().inv_cdf(probability))


@dataclass(frozen=True)
class JudgedWeight:
    """A quantized weight, its reference, and the measurements of its groups."""

    name: str
    file: str
    weight: QuantizedWeight
    reference: Tensor
    errors: GroupErrors
    limit: float
    """In standard deviations."""
    roundoff: float
    """Unit roundoff of the dtype in which the quantizer computed."""

    def judge(self) -> WeightResult:
        """Find the faults, worst first."""
        errors = self.errors
        allowed = self._slope_allowed()
        deviations = (errors.slope.abs() - allowed) / errors.slope_deviation
        codes = errors.other_codes / errors.other_codes_deviation
        is_coded = codes.hypot(deviations.clamp(min=0)) > self.limit
        is_coded &= errors.is_rounded
        is_scale = (deviations > self.limit) | (is_coded & (deviations > _FEWEST_DEVIATIONS))
        pooled, pooled_seen = self._judge_pooled()
        is_scale |= pooled
        is_zero = errors.offset.abs() > (self.limit * errors.offset_deviation).clamp(_LEAST_STEPS)
        over = self._over_best()
        most = _MOST_OVER_BEST if errors.is_rounded else _MOST_OVER_BEST_OF_GPTQ
        is_other = is_coded | ~(over <= most) | self._is_random
        is_other[self._parts_apart[1]] = True
        is_unlike = ~(errors.correlation >= self._least_similar) & (over > _LEAST_OVER_BEST)
        best = errors.best.clamp(min=self._floor)
        is_faulty = is_scale | is_zero | is_other
        error, median_best = float(errors.error.nanmedian()), float(best.nanmedian())
        is_all = len(over) > 1 and float(is_faulty.double().mean()) > 1 / 2
        is_all |= not error <= _MOST_OVER_MEDIAN * median_best
        is_all |= self._has_common_slope
        is_all |= not float(errors.correlation.nanmedian()) > _LEAST_SIMILAR_IN_MEDIAN
        found = [self._of_whole()] if is_all else self._of_groups(
            is_scale, is_zero, is_other, is_unlike, over
        )  # fmt: skip
        # A scale that is too large by a factor makes the deviation, in its steps, as much larger.
        part = ((self.limit + _POWER) * errors.slope_deviation).clamp(max=1)
        seen = part / (1 - part) + allowed
        resolution = float(torch.minimum(seen, pooled_seen).nanquantile(_SHARE_OF_GROUPS))
        return WeightResult(
            self.name,
            self.file,
            len(over),
            error,
            median_best,
            float((errors.error / best).nan_to_num(torch.inf).max()),
            resolution=resolution,
            findings=tuple(found),
            is_other=is_all,
        )

    def _judge_pooled(self) -> tuple[Tensor, Tensor]:
        """Return which groups deviate from the usual slope of their columns, and what would be seen."""
        errors, pooled = self.errors, self.errors.pooled
        if pooled is None:
            nowhere = torch.zeros_like(errors.slope, dtype=torch.bool)
            return nowhere, torch.full_like(errors.slope, torch.inf)
        bent = self._slope_allowed()
        least = self.limit * pooled.deviation + self.weight.scale_precisions
        usual = torch.minimum(torch.maximum(pooled.usual, -bent), bent)
        seen = (least + _POWER * pooled.deviation) / pooled.gain + (usual - pooled.usual).abs()
        return (pooled.slope - usual).abs() > least, seen

    @cached_property
    def _floor(self) -> Tensor:
        """Return the relative error that the dtypes of weights and scales allow in each group."""
        return self.roundoff + self.weight.scale_precisions

    def _slope_allowed(self) -> Tensor:
        """Return the slope that format and quantization method may leave in each group."""
        bend = 0.0 if self.errors.is_rounded else _MOST_BENT
        return self._floor + bend * self.errors.best.square()

    @property
    def _is_random(self) -> Tensor:
        """Return True for each group whose codes fit as badly as random ones."""
        errors = self.errors
        share = errors.error / errors.random
        usual = share.view(self.weight.groups.grid_shape).nanmedian(0).values
        usual = usual.expand(self.weight.groups.grid_shape).flatten()
        is_alone = share > _MOST_OVER_USUAL * usual
        is_unlike = errors.correlation < _LEAST_SIMILAR_TO_EXPECTED
        return (share > _MOST_OF_RANDOM) & (is_alone | is_unlike)

    @property
    def _has_common_slope(self) -> bool:
        bend = _MOST_BENT * float(self.errors.best.nanmedian()) ** 2
        return abs(float(self.errors.slope.nanmedian())) > max(_LEAST_COMMON_SLOPE, bend)

    @property
    def _least_similar(self) -> float:
        median = float(self.errors.correlation.nanmedian())
        return min(_LEAST_SIMILAR, max(_PART_OF_MEDIAN * median, _LEAST_SIMILAR_IN_MEDIAN))

    def _over_best(self) -> Tensor:
        errors = self.errors
        absolute = errors.error * errors.size
        least = torch.maximum(
            errors.best.clamp(min=self._floor) * errors.size, absolute.nanmedian()
        )
        return torch.where(absolute == 0, 0.0, absolute / least)

    def _of_whole(self) -> WeightFault:
        errors = self.errors
        cause: Cause = "values"
        amount = float(errors.offset.nanmedian())
        if float(errors.correlation.nanmedian()) < self._least_similar:
            amount = 0.0
        elif abs(amount) > _LEAST_STEPS:
            cause = "zero-point"
        elif self._has_common_slope:
            cause, amount = "scale", float(errors.factor.nanmedian())
        error, best = float(errors.error.nanmedian()), float(errors.best.nanmedian())
        return WeightFault(
            self.name, cause, error, max(best, float(self._floor.median())), amount=amount
        )

    def _of_groups(
        self, is_scale: Tensor, is_zero: Tensor, is_other: Tensor, is_unlike: Tensor, over: Tensor
    ) -> list[WeightFault]:
        errors = self.errors
        factors = errors.factor if errors.pooled is None else 1 + errors.pooled.slope
        severity = torch.where(over.isnan(), torch.inf, over)
        partners = self._find_owners(is_unlike, severity)
        groups = (is_scale | is_zero | is_other).nonzero()[:, 0].tolist()
        shifted = (is_scale | is_zero).nonzero()[:, 0].tolist()
        exchanged = self._find_exchanged([one for one in shifted if one not in partners])
        found = []
        for group in sorted({*groups, *partners}, key=lambda one: -float(severity[one])):
            cause: Cause = "values"
            amount = 0.0
            partner = partners.get(group, exchanged.get(group))
            if partner is not None:
                cause = "swapped" if group in partners else "swapped-parameters"
            elif is_zero[group]:
                cause, amount = "zero-point", float(errors.offset[group])
            elif is_scale[group] and errors.correlation[group] >= self._least_similar:
                cause, amount = "scale", float(factors[group])
            found.append(
                WeightFault(
                    self.name,
                    cause,
                    float(errors.error[group]),
                    max(float(errors.best[group]), float(self._floor[group])),
                    self._place_values(group) if cause == "values" else self._place(group),
                    amount,
                    None if partner is None else self._place(partner),
                )
            )
        return found[:_MOST_LISTED]

    @cached_property
    def _parts_apart(self) -> tuple[Tensor, Tensor]:
        """Return row and group of each part whose codes are too far from exact rounding."""
        is_rounded, groups = self.errors.is_rounded, self.weight.groups
        most = _MOST_OVER_PARTS if is_rounded else _MOST_OVER_PARTS_OF_GPTQ
        rows, across = (self.errors.parts > most).any(-1).nonzero().unbind(1)
        return rows, rows // groups.block[0] * groups.grid_shape[1] + across

    def _place_values(self, group: int) -> WeightRegion:
        """Return the rows of a group with wrong values, or all of them."""
        place, (rows, groups) = self._place(group), self._parts_apart
        if self.weight.groups.block[0] == 1 or not bool((groups == group).any()):
            return place
        first, last = rows[groups == group].aminmax()
        return replace(place, rows=range(int(first), int(last) + 1))

    def _place(self, group: int) -> WeightRegion:
        rows, columns = self.weight.groups.place(group)
        return WeightRegion(range(rows.start, rows.stop), tuple(columns))

    def _find_owners(self, is_unlike: Tensor, severity: Tensor) -> dict[int, int]:
        """Map groups that do not resemble their expected values to the groups whose values they hold."""
        groups = self.weight.groups
        suspects = sorted(is_unlike.nonzero()[:, 0].tolist(), key=lambda one: -float(severity[one]))
        suspects = suspects[:_MOST_SEARCHED]
        if not suspects or groups.num_groups == 1:
            return {}
        values = functional.normalize(
            torch.stack([self._values_of(one) for one in suspects]), dim=1
        )
        most = torch.full((len(suspects),), self._least_similar)
        owners: dict[int, int] = {}
        for rows in groups.chunks():
            if rows.start % groups.block[0]:
                continue  # inside a block larger than a chunk
            first, blocks = groups.stack(self.reference, rows)
            if blocks.shape[1] != values.shape[1]:
                continue
            similar = values @ functional.normalize(blocks, dim=1).t()
            found, index = similar.max(1)
            for number in (found > most).nonzero()[:, 0].tolist():
                most[number] = found[number]
                owners[suspects[number]] = first + int(index[number])
        return {one: owner for one, owner in owners.items() if one != owner}

    def _values_of(self, group: int) -> Tensor:
        groups = self.weight.groups
        values = self.weight.dequantize_rows(groups.rows_of(group))[:, group % groups.grid_shape[1]]
        missing = groups.block[0] - len(values)
        return functional.pad(values, (0, 0, 0, missing)).flatten()

    def _find_exchanged(self, suspects: list[int]) -> dict[int, int]:
        """Return pairs of groups with each other's scale and zero point."""
        errors, weight = self.errors, self.weight
        found: dict[int, int] = {}
        for one in suspects[:_MOST_LISTED]:
            for other in suspects[:_MOST_LISTED]:
                fits = all(
                    abs(
                        float(weight.scales[left] / (1 + errors.slope[left]) / weight.scales[right])
                        - 1
                    )
                    < _SAME_SCALE + 3 * float(errors.slope_deviation[left])
                    and abs(float(weight.zeros[left] - errors.offset[left] - weight.zeros[right]))
                    < _LEAST_STEPS
                    for left, right in ((one, other), (other, one))
                )
                if fits and one != other:
                    found[one] = other
        return found
