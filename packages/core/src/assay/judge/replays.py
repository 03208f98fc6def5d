"""The judge: from the error sums of two replays to ratios, and from ratios to the faulty stage.

Two runs replay the same trace: the candidate, and the *noise run* on the trusted device in the
candidate's dtype. For every port each has one `PairSums`. The judge divides the candidate's error by
that of the noise run, statistic by statistic (`judge_replay`), groups the ratios over their limits by the stage
that made them (`rank_stages`), and names the stage where the error arises (`find_origin`).

Why a ratio: a limit on the error itself would depend on dtype, width and depth of each operation. Both runs
make the same roundings in some order, so the ratio of their errors is near 1 for any correct
candidate, and one table of limits holds for all models. A ratio over 0 / 0 is 0: equal values agree.

Invariants:
    - A statistic without noise is judged against what one rounding of the dtype explains, never against
      zero, unless the values must be equal (`exact`, `non-finite`).
    - An allowance raises the expected error of a place, never the limit, and only for work that the
      noise run did elsewhere: in modules that a fused kernel replaces, in another order of sums.
    - NaN fails. Comparisons are written so that NaN counts as the larger number.
    - Ports are judged in the order of the forward pass, and ties keep it.

Trap: the worst stage is often not the first one. A fault in the code of all layers has its largest ratio in an
arbitrary layer, and one wrong mask fails attention in every layer. `find_origin` therefore prefers the
first stage that runs the same code and fails at all over the one with the largest ratio.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Self

from assay.dtypes import FORMATS, float_format
from assay.judge.levels import MOST_LISTED, describe_judged_level, find_reported
from assay.judge.limits import Limits
from assay.judge.results import ExactCount, PortResult, ReplayResults
from assay.metrics import PairSums
from assay.noise import (
    NO_NOISE,
    NO_SHARE,
    SLOPE_STANDARD_ERRORS,
    device_share,
    error_ratios,
    share_ratio,
)
from assay.stages import Stage
from assay.statistics import STATISTICS
from assay.verdicts import Location, Ratio, Suspect

# The error is made at the first stage in the forward pass whose severity is within this factor of
# the worst one. One wrong mask gave 1e6 at its place and 3.9 elsewhere.
SEVERITY_RANGE = 10.0

# If the noise run rounds a larger share of its elements wrongly, an operation of the stage adds values
# in some order, and the share cannot be compared. Twenty times what an accurate float32 function
# misrounds in bfloat16 (SHARE_FLOOR in noise.py), less than half of the floor itself.
PURE_ROUNDING_SHARE = 0.002

# Truncated sums shrink every matrix product by half a unit roundoff (large significands) to a whole
# one (small ones): all lie within a factor of two of each other, and of their median. One wrong
# product can move the median of fewer products; one product in ten may be the fault.
FEWEST_PRODUCTS = 4
LEAST_OF_MEDIAN, MOST_OF_MEDIAN = 0.5, 2.0
SHARE_ALIKE = 0.9


@dataclass(frozen=True, slots=True)
class Judged(Ratio):
    """One statistic at one port, judged."""

    port: PortResult = field(kw_only=True)

    @classmethod
    def of(cls, ratio: Ratio, limit: float, port: PortResult) -> Self:
        """Judge `ratio` by `limit`."""
        return cls(ratio.statistic, ratio.actual, ratio.expected, limit, port=port)


@dataclass(frozen=True, slots=True)
class DeviceBias:
    """A slope that all matrix products share because of the device's rounding."""

    slope: float
    num_modules: int

    @property
    def note(self) -> str:
        """Return the note for a verdict."""
        return (
            f"all {self.num_modules} matrix products shrink their results by about"
            f" {-self.slope:.1e}: the device truncates sums. This is not counted as an error;"
            " an equal error in all of them would not be seen"
        )


@dataclass(frozen=True, slots=True)
class Allowances:
    """Errors that a correct run may have beyond those of the noise run at the same place."""

    least_units: Mapping[Stage, float] = field(default_factory=dict)
    """By stage, the relative error of whole rows that one rounding in it may cause."""
    other_work: Mapping[str, Sequence[PairSums]] = field(default_factory=dict)
    """By module, the noise run's sums of other modules whose work its stage also does."""


NO_ALLOWANCES = Allowances()


def judge_replay(
    candidate: ReplayResults,
    noise: ReplayResults,
    limits: Limits,
    allowances: Allowances = NO_ALLOWANCES,
) -> tuple[list[Judged], DeviceBias | None]:
    """Judge every statistic of every port, in the order of the forward pass."""
    bias = _device_bias(candidate, noise)
    noise_of_uncalled = _noise_of_uncalled(candidate, noise)
    judged = []
    for key, port in candidate.ports.items():
        reference = noise.ports.get(key)
        common = bias.slope if bias else 0.0
        module = port.stage.module
        others = [*noise_of_uncalled.get(module, ()), *allowances.other_work.get(module, ())]
        least = allowances.least_units.get(port.stage, 0.0)
        judged += [
            Judged.of(ratio, limits.of(ratio.statistic), port)
            for ratio in _ratios(port, reference, least, common, others)
        ]
    return judged, bias


def _noise_of_uncalled(candidate: ReplayResults, noise: ReplayResults) -> dict[str, list[PairSums]]:
    """Return the noise run's sums of modules that the candidate never calls, by nearest called ancestor.

    A fused ancestor does its children's work as well as its own, and may round as often. That
    includes the values that its code passes to its children or gets from them.
    """
    found: dict[str, list[PairSums]] = {}
    uncalled = set(candidate.uncalled_modules)
    # A module whose arguments and results all come from other stages appears only as a stage.
    called = {
        name for port in candidate.ports.values() for name in (port.module, port.stage.module)
    }
    for (module, _), result in noise.ports.items():
        if module not in uncalled or not result.sums.num_elements:
            continue
        ancestor = module
        # Containers such as a ModuleList are never called.
        while ancestor and ancestor not in called:
            ancestor = ancestor.rpartition(".")[0]
        if result.stage.module in (module, ancestor):
            found.setdefault(ancestor, []).append(result.sums)
    return found


def _ratios(
    port: PortResult,
    noise: PortResult | None,
    least_unit: float,
    common: float,
    others: Sequence[PairSums],
) -> Iterable[Ratio]:
    if port.exact.num_compared:
        yield _exact_ratio(port.exact, ExactCount() if noise is None else noise.exact)
    sums = port.sums
    if not sums.num_elements:
        return
    if sums.num_nan or sums.num_inf:
        yield Ratio("non-finite", math.nan, 0.0)
        return
    unit = max(_unit_roundoff(port, noise), least_unit)
    reference = noise.sums if noise is not None and noise.sums.num_elements else NO_NOISE
    share = device_share(sums.slope, common, _is_product(port)) if common else NO_SHARE
    if least_unit:
        share = replace(share, floor=max(share.floor, least_unit))
    if port.stage.phase == "clip":
        share = replace(share, floor=max(share.floor, unit))  # one factor multiplies all gradients
    of_others = [
        {ratio.statistic: ratio.expected for ratio in error_ratios(other, other, unit)}
        for other in others
    ]
    for ratio in error_ratios(sums, reference, unit, share):
        more = [expected.get(ratio.statistic, 0.0) for expected in of_others]
        # Roundings of one module and of the next are independent: their squares add up.
        yield replace(ratio, expected=math.hypot(ratio.expected, *more))
    if others:
        return
    # Counts of wrong roundings are comparable in one dtype only.
    alike = noise is not None and noise.pointwise and noise.dtype == port.dtype
    if alike and reference.misrounded_share <= PURE_ROUNDING_SHARE:
        yield share_ratio(sums, reference)


def _exact_ratio(actual: ExactCount, noise: ExactCount) -> Ratio:
    """Compare integers, which must be equal unless rounding alone changes some: an indexer's choice of keys.

    One more difference than in the noise run is always within the noise.
    """
    share = actual.num_different / actual.num_compared
    if not noise.num_different:
        return Ratio("exact", share, 0.0)
    return Ratio("replay-choice", share, (noise.num_different + 1) / noise.num_compared)


def _unit_roundoff(port: PortResult, noise: PortResult | None) -> float:
    dtype = noise.dtype if noise is not None else port.dtype
    return float_format(dtype if dtype in FORMATS else "float32").unit_roundoff


def _is_product(port: PortResult) -> bool:
    return "Linear" in port.kind


def _device_bias(candidate: ReplayResults, noise: ReplayResults) -> DeviceBias | None:
    """Return the median slope of matrix products if nearly all shrink alike.

    Truncated sums shrink every product by up to one unit roundoff (see `sim:truncate`). A product
    that grows, or shrinks by more, is wrong for another reason.
    """
    products = [
        (port.sums, noise.ports[key].sums, _unit_roundoff(port, noise.ports[key]))
        for key, port in candidate.ports.items()
        if key in noise.ports and _is_product(port) and port.sums.num_elements
    ]
    if len(products) < FEWEST_PRODUCTS:
        return None
    slopes = [actual.slope for actual, _, _ in products]
    middle = median(slopes)
    chance = max(SLOPE_STANDARD_ERRORS * actual.slope_standard_error for actual, _, _ in products)
    unit = max(unit for _, _, unit in products)
    alike = sum(LEAST_OF_MEDIAN * middle >= slope >= MOST_OF_MEDIAN * middle for slope in slopes)
    truncates = middle < 0 and chance < abs(middle) <= unit
    return (
        DeviceBias(middle, len(slopes))
        if truncates and alike >= SHARE_ALIKE * len(slopes)
        else None
    )


_REPORTED_FIRST = list(STATISTICS)


@dataclass(frozen=True, slots=True)
class FailedStage:
    """A stage with at least one statistic over its limit."""

    stage: Stage
    reported: Judged
    """The statistic that describes the failure."""
    severity: float
    """The severity of the worst statistic."""
    order: int


def rank_stages(judged: Iterable[Judged]) -> list[FailedStage]:
    """Return all failed stages, worst first."""
    by_stage: dict[Stage, list[Judged]] = {}
    for item in judged:
        if item.failed:
            by_stage.setdefault(item.port.stage, []).append(item)
    ranked = [
        FailedStage(
            stage,
            min(
                items,
                key=lambda item: (_REPORTED_FIRST.index(item.statistic), -item.severity),
            ),
            max(item.severity for item in items),
            min(item.port.order for item in items),
        )
        for stage, items in by_stage.items()
    ]
    return sorted(ranked, key=lambda item: (-item.severity, item.order))


def find_nonfinite_padding(results: ReplayResults) -> FailedStage | None:
    """Return the first stage that writes NaN or infinity into padding where the reference is finite.

    Some kernels leave padding undefined, and usually nothing reads it. It is a fault only if values
    that are read became NaN too: attention multiplies padding by zero, which keeps a NaN.
    """
    found = [port for port in results.ports.values() if port.num_nonfinite_padding]
    if not found:
        return None
    first = min(found, key=lambda port: port.order)
    reported = Judged.of(Ratio("non-finite", math.nan, 0.0), 0.0, first)
    return FailedStage(first.stage, reported, math.inf, first.order)


def find_origin(
    ranked: list[FailedStage], step_of: Callable[[FailedStage], int] = lambda _: 0
) -> FailedStage | None:
    """Return the stage that makes the error: the first of those that are about as bad as the worst.

    If the same code fails earlier too, however mildly, return that stage: the severity of a fault in all
    layers varies by chance, and an error in forward has one in backward of the same step.

    step_of: returns the first step in which a stage is wrong.
    """
    if not ranked:
        return None
    threshold = ranked[0].severity / SEVERITY_RANGE
    worst = min(
        (item for item in ranked if item.severity >= threshold), key=lambda item: item.order
    )
    alike = (
        item
        for item in ranked
        if _code_of(item.stage) == _code_of(worst.stage)
        and (item.stage.phase == worst.stage.phase or step_of(item) <= step_of(worst))
    )
    return min(alike, key=lambda item: item.order)


def _code_of(stage: Stage) -> Stage:
    """Return the stage of all layers that run the same code. Backward is derived from forward."""
    phase = "forward" if stage.phase == "backward" else stage.phase
    return Stage(re.sub(r"\d+", "*", stage.module), phase)


def list_suspects(
    ranked: Sequence[FailedStage],
    location_of: Callable[[FailedStage], Location],
    named: tuple[Location, Judged | None] | None = None,
) -> list[Suspect]:
    """List failed stages by ratio / limit of their reported statistic, worst first, equal ones in model order.

    named: the place that the verdict names, which is always listed, once. Its statistic is None for a
        fact without a noise ratio.
    """
    found: list[tuple[Location, Judged | None]] = [named] if named is not None else []
    for item in ranked:
        place = location_of(item)
        is_named = named and (item.reported is named[1] or _key_of(place) == _key_of(named[0]))
        if not is_named:
            found.append((place, item.reported))
    found.sort(key=lambda pair: -1 if pair[1] is None else pair[1].port.order)
    own = [_suspect(*named)] if named is not None else []
    listed = [_suspect(*pair) for pair in found]
    listed.sort(key=lambda one: -one.noise_ratio / one.limit if one.limit else -math.inf)
    # Several stages may have one location, such as the parameters of a module.
    unique: dict[str, Suspect] = {}
    for one in listed:
        unique.setdefault(one.location.model_dump_json(), one)
    kept = list(unique.values())[:MOST_LISTED]
    return kept if not own or own[0] in kept else [*kept[:-1], *own]


def _suspect(location: Location, item: Judged | None) -> Suspect:
    if item is None:
        return Suspect(location=location, statistic="exact", noise_ratio=math.inf, limit=0.0)
    return item.suspect(location)


def _key_of(location: Location) -> tuple[object, ...]:
    """Return the key of a place: its location without the step and the operation."""
    return location.phase, location.rank, location.module, location.parameter


def describe_stages_level(
    judged: Sequence[Judged], deciding: Judged | None = None
) -> dict[str, Any]:
    """Extend `describe_judged_level` by the module of the ratio."""
    if not judged:
        return {}
    reported = find_reported(judged, deciding)
    return {"module": reported.port.stage.module} | describe_judged_level(judged, reported)
