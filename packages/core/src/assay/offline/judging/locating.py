"""Judging of ports, and location of the first wrong module from its inputs and outputs.

An error propagates through all later modules. The module that makes it is the first whose inputs agree
within noise and whose output does not.
"""

import math
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import get_args

from assay.comparing.limits import Limits
from assay.comparing.results import PortResult
from assay.metrics import PairSums
from assay.noise import (
    TENSOR_FLOOR,
    at_least,
    channel_ratio,
    error_beyond,
    error_ratios,
)
from assay.offline.expected_noise import NoiseLaw, adam_error, count_blocks
from assay.offline.judging.judged_ports import JudgedPort
from assay.offline.measuring.measured import MeasuredPorts
from assay.offline.metrics.pair_metrics import MetricValues
from assay.offline.ports.lanes import Port
from assay.sites import Phase
from assay.statistics import Statistic
from assay.verdicts import Ratio

_PHASES = get_args(Phase)
_NEVER = (sys.maxsize, sys.maxsize)


@dataclass(frozen=True, slots=True)
class Origin:
    """The module that makes an error."""

    judged: JudgedPort
    evidence: str
    """`inputs agree` if its inputs were compared, `growth` if only earlier results were, or `replayed`.
    `given` for an input of the model that differs."""


def judge_ports(
    ports: Sequence[Port],
    measured: MeasuredPorts,
    noise: MeasuredPorts | None,
    limits: Limits,
    unit_roundoff: float,
    metrics: MetricValues,
    num_blocks: int = 0,
    *,
    is_ordered: bool = True,
) -> list[JudgedPort]:
    """Judge every port, by step and phase in the order of the expected dump.

    noise: measurement of the noise dump; None to derive the expected error from the depth.
    unit_roundoff: the unit roundoff of the coarser dtype of the two dumps.
    metrics: judged if the limits name them. Their ratio is relative to the limit.
    num_blocks: number of blocks in the network. Logits have passed all of them.
    is_ordered: False if a port outside of the blocks may follow all of them.
    """
    judged = []
    results = sorted(
        [(port, result) for port in ports for result in measured.of(port)],
        key=lambda item: (item[1].step, _PHASES.index(item[0].phase)),
    )
    noise_of = {
        (port, one.step): one for port in ports if noise for one in reversed(noise.of(port))
    }
    deepest = max((count_blocks(port.module) for port, _ in results), default=0)
    drifts = {step: sums.relative_error for step, sums in measured.drift.items()}
    law = NoiseLaw(unit_roundoff, max(deepest, num_blocks), drifts)
    gradient_errors: dict[tuple[str, str], float] = {}
    depth = 0 if is_ordered else num_blocks
    for order, (port, result) in enumerate(results):
        if port.phase == "forward":
            depth = max(depth, count_blocks(port.module))
        if port.level == "logits":
            depth = max(depth, num_blocks)
        expected = law.expected(port, count_blocks(port.module) or depth, result.step)
        parameter = port.module, port.name.partition(".")[2]
        if port.phase in ("backward", "clip"):
            known = gradient_errors.get(parameter, 0.0)
            gradient_errors[parameter] = max(known, result.sums.relative_error)
        if port.direction == "update":
            of_gradient = gradient_errors.get(parameter)
            floor = law.gradient_roundoff if of_gradient is not None else expected
            expected = adam_error(max(floor, of_gradient or 0.0))
        reference = noise_of.get((port, result.step))
        named = {
            name: value
            for name, value in metrics.get((port, result.rank), {}).items()
            if name in limits.by_statistic
        }
        ratios = tuple(
            ratio.judged(1.0 if ratio.statistic in named else limits.of(ratio.statistic))
            for ratio in _ratios(port, result, reference, limits, expected, unit_roundoff, named)
        )
        error = measured.norm_errors.get((port, result.rank, result.step))
        if error is not None:
            of_noise = reference.sums.relative_error if reference is not None else 0.0
            ratio = Ratio("norm-error", error, of_noise or expected)
            if math.isnan(error):
                ratio = Ratio("non-finite", error, 0.0)
            ratios += (ratio.judged(limits.of(ratio.statistic)),)
        if ratios:
            judged.append(JudgedPort(port, order, result, ratios, expected, reference))
    return judged


def _ratios(
    port: Port, result: PortResult, noise: PortResult | None, limits: Limits, expected: float,
    unit_roundoff: float, metrics: Mapping[Statistic, float],
) -> list[Ratio]:  # fmt: skip
    sums = result.sums
    found = []
    is_weight = port.direction == "parameter" and port.phase == "forward"
    if result.exact.num_compared:
        share = result.exact.num_different / result.exact.num_compared
        found.append(Ratio("exact", share, 0.0))
    if is_weight:
        return found
    if sums.num_nan or sums.num_inf:
        return [*found, Ratio("non-finite", math.nan, 0.0)]
    if not sums.num_elements:
        return found
    found += [Ratio(name, value, limits.of(name)) for name, value in metrics.items()]
    if not limits.names_noise_ratios:
        return found
    if noise is None or not noise.sums.num_elements:
        return [*found, Ratio("accumulated", sums.relative_error, expected)]
    return [*found, *_accumulated_ratios(sums, noise.sums, unit_roundoff)]


def _accumulated_ratios(actual: PairSums, noise: PairSums, unit_roundoff: float) -> Iterator[Ratio]:
    """Yield the statistics of an accumulated error: no value was injected on the way."""
    if not noise.rows:  # EXPECTED records the norms of its noise only
        known = at_least(TENSOR_FLOOR * unit_roundoff, noise.relative_error)
        yield Ratio("accumulated", actual.relative_error, known)
        return
    for ratio in error_ratios(actual, noise, unit_roundoff):
        if ratio.statistic == "replay-tensor":
            yield replace(ratio, statistic="accumulated")
        elif ratio.statistic == "replay-channel":
            # A channel of one token may be exact by chance: in a tensor with relative noise 2.7e-7, one
            # channel had 5e-8. So each channel has at least the noise of the whole tensor.
            unit = max(unit_roundoff, noise.relative_error / TENSOR_FLOOR)
            yield channel_ratio(actual, noise, unit) or ratio
        # Without finite expected values, the rest of a row does not measure its error.
        elif ratio.statistic != "replay-row" or not actual.lacks_expected:
            yield ratio


def find_wrong_replicas(
    replica_errors: Mapping[tuple[Port, int], float], limits: Limits, unit_roundoff: float
) -> list[str]:
    """Return a sentence for each replica in EXPECTED that differs between ranks.

    replica_errors: relative difference from the first rank, by port and rank.
    """
    deepest = max((count_blocks(port.module) for port, _ in replica_errors), default=0)
    law = NoiseLaw(unit_roundoff, deepest)

    def limit(port: Port) -> float:
        if port.direction == "parameter" or not limits.names_noise_ratios:
            return 0.0
        return limits.of("accumulated") * law.expected(port, count_blocks(port.module) or deepest)

    return [
        f"EXPECTED holds another {port} on rank {rank} than on the first one: error {error:.2g}"
        for (port, rank), error in replica_errors.items()
        if not error <= limit(port)
    ]


def find_origins(judged: Sequence[JudgedPort], absent_masks: Collection[Port]) -> list[Origin]:
    """Return the modules that make an error, in order. The first one is the location.

    The first wrong value in time decides: a model may get its own results in later passes. Then the order
    of modules does. The parent of another such module is left out: it differs because of its child.
    Training steps after the first different one are left out too.

    absent_masks: masks that only one side holds. One explains a difference, but is not a difference by itself.
    """
    failed = [
        item
        for item in judged
        if not item.agrees and item.port.level != "weights" and item.port not in absent_masks
    ]
    if failed and failed[0].worst.statistic == "non-finite":
        # A NaN in padding is harmless at its origin, and spreads through attention.
        padding = [one for one in judged if one.result.num_nonfinite_padding]
        earlier = [one for one in padding if one.order < failed[0].order]
        if earlier:
            return [Origin(earlier[0], "growth")]
    failed = [item for item in failed if item.result.step == failed[0].result.step]
    if failed and failed[0].port.phase == "clip" and (unlike := _find_unlike(judged, failed)):
        return [Origin(item, "unlike") for item in unlike]
    start = _NEVER
    if failed and failed[0].port.phase == "forward":
        failed = [item for item in failed if item.port.phase == "forward"]
        known = [item.first_bad_pass for item in failed if item.first_bad_pass is not None]
        start = min(known, default=(0, failed[0].result.step))
        failed = [item for item in failed if item.differs_by(start)]
    given = _group_given(judged)
    found = [Origin(one, "given") for one in _find_different_inputs(judged, failed, start)[:1]]
    for item in failed:
        if not _is_made(item.port):
            continue
        own = given.get(_given_key(item), [])
        if own and not any(one.differs_by(start) for one in own):
            found.append(Origin(item, "inputs agree"))
        elif not own and item is failed[0]:
            found.append(Origin(item, "growth"))
    if not found:  # the error of an operation may not show in the output of its module
        found = [Origin(item, "growth") for item in failed if item.port.direction == "op"][:1]
    places = [
        (one.judged.port.phase, one.judged.port.module) for one in found if one.evidence != "given"
    ]
    found = [
        one
        for one in found
        if one.evidence == "given"
        or not any(
            phase == one.judged.port.phase and is_inside(module, one.judged.port.module)
            for phase, module in places
        )
    ]
    return found or [Origin(item, "growth") for item in failed[:1]]


def _find_unlike(judged: Sequence[JudgedPort], failed: Sequence[JudgedPort]) -> list[JudgedPort]:
    """Return the few clipped gradients without the factor that most have in common, worst first."""
    sums = {
        id(one): one.result.sums
        for one in judged
        if one.port.phase == "clip" and one.port.is_of_parameter
        and one.result.step == failed[0].result.step and one.result.sums.ee
    }  # fmt: skip
    factor = 1 + median(one.slope for one in sums.values()) if sums else 1.0
    errors = {number: error_beyond(one, factor) for number, one in sums.items()}
    unlike = [one for one in failed if errors.get(id(one), 0.0) > one.worst.resolution]
    is_few = 2 * len(unlike) < len(sums)
    return sorted(unlike, key=lambda one: -errors[id(one)]) if is_few else []


def _find_different_inputs(
    judged: Sequence[JudgedPort], failed: Sequence[JudgedPort], start: tuple[int, int]
) -> list[JudgedPort]:
    """Return the inputs that differ in the pass `start` or before, and that no module made.

    A mask of padding is passed on from module to module. Of the others, those of the model itself count.
    """
    if not failed or start == _NEVER:
        return []
    modules = {
        one.port.module: None
        for one in judged
        if one.port.phase == "forward" and any(at == start for at, _ in one.result.passes)
    }
    outer = [one for one in modules if not any(is_inside(one, other) for other in modules)]
    return [
        one
        for one in judged
        if one.port.phase == "forward" and one.port.direction == "input"
        and one.differs_by(start) and one.port.module in outer
        and (len(outer) == 1 or one.port.name.endswith("mask"))
    ]  # fmt: skip


def _is_given(port: Port) -> bool:
    """Return True for an input of the computation. In backward, that is the gradient of an output."""
    return port.direction == {"forward": "input", "backward": "output"}.get(port.phase)


def _is_made(port: Port) -> bool:
    """Return True for a result of a module or phase."""
    if port.is_of_parameter:
        return True
    made = {"forward": "output", "backward": "input"}.get(port.phase)
    return made is None or port.direction == made


def _given_key(item: JudgedPort) -> tuple[object, ...]:
    """Return the key that a result shares with its inputs."""
    if item.port.is_of_parameter and item.port.phase != "backward":
        return (*item.call[:1], item.port.name.partition(".")[2], *item.call[1:])
    return item.call


def _group_given(judged: Sequence[JudgedPort]) -> dict[tuple[object, ...], list[JudgedPort]]:
    """Return the inputs of every result, by `_given_key`.

    A phase after backward gets the gradient of the previous phase.
    """
    given: dict[tuple[object, ...], list[JudgedPort]] = {}
    gradients: dict[tuple[str, str, int, int], JudgedPort] = {}
    for item in judged:
        if _is_given(item.port):
            given.setdefault(item.call, []).append(item)
        elif item.port.is_of_parameter and item.port.phase != "forward":
            module, phase, rank, step = item.call
            name = item.port.name.partition(".")[2]
            before = gradients.get((module, name, rank, step))
            if before is not None and before.port.phase != phase:
                given[module, name, phase, rank, step] = [before]
            if item.port.direction == "parameter":
                gradients[module, name, rank, step] = item
    return given


def is_inside(module: str, outer: str) -> bool:
    """Return True if `module` is a descendant of `outer`."""
    return module != outer and (not outer or module.startswith(f"{outer}."))
