"""Judging of ports: the ratios of each by noise and limits, and the passes in which it differs."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import get_args

from assay.comparison.measuring.pair_measurer import (
    MeasuredPorts,
    NoiseLaw,
    adam_error,
    count_blocks,
)
from assay.comparison.measuring.pair_values import MetricValues
from assay.comparison.pairing.port_series import Port
from assay.judge.limits import Limits
from assay.judge.results import PortResult
from assay.metrics import NormSums, PairSums, RowErrors
from assay.noise import TENSOR_FLOOR, at_least, channel_ratio, error_ratios
from assay.sites import Phase
from assay.statistics import SYSTEMATIC, Statistic
from assay.verdicts import Ratio

_PHASES = get_args(Phase)
# Share of the limit from which a port counts as wrong in the first wrong pass: 1.75 times the noise of the same
# pass, as the limit is 3.5.
_CARRIED = 0.5


@dataclass(frozen=True, eq=False)
class JudgedPort:
    """One port with its judged ratios."""

    port: Port
    order: int
    result: PortResult
    ratios: tuple[Ratio, ...]
    expected_noise: float = 0.0
    """Expected relative error, used without a noise run."""
    noise: PortResult | None = None
    """The measurement of the noise run."""

    @property
    def worst(self) -> Ratio:
        """Return the ratio furthest over its limit, or nearest to it."""
        return max(self.ratios, key=lambda item: item.severity)

    @property
    def call(self) -> tuple[str, str, int, int]:
        """Return what the inputs and outputs of a module share: module, phase, rank and step."""
        return self.port.module, self.port.phase, self.result.rank, self.result.step

    @property
    def is_blind(self) -> bool:
        """Return True if the expected noise is so large that a tensor of zeros would agree.

        Equal values agree without noise.
        """
        if self.result.sums.num_elements and not self.result.sums.dd:
            return False
        inexact = [item for item in self.ratios if item.expected]
        return bool(inexact) and all(item.resolution >= 1 for item in inexact)

    @property
    def is_equal(self) -> bool:
        """Return True if all values were compared, and are equal."""
        sums, exact = self.result.sums, self.result.exact
        is_finite = not (sums.num_nan or sums.num_inf)
        is_compared = bool(sums.num_elements or exact.num_compared)
        return is_compared and is_finite and not sums.dd and not exact.num_different

    @property
    def agrees(self) -> bool:
        """Return True if no ratio is over its limit."""
        return not any(item.failed for item in self.ratios)

    @cached_property
    def first_bad_row(self) -> int | None:
        """Return the number of the first row over the limit, or else of the worst of the first wrong pass."""
        relative = RowErrors.concatenate(self.result.sums.rows).relative().nan_to_num(math.inf)
        if not len(relative):
            return None
        if self.worst.statistic not in SYSTEMATIC:
            bad = (relative > self.worst.limit * self.worst.expected).nonzero()
            if len(bad):
                return int(bad[0, 0])
        ends = list(accumulate(number for _, number in self.result.passes))
        of_pass = (
            range(end - number, end)
            for (at, number), end in zip(self.result.passes, ends, strict=True)
            if at == self.first_bad_pass and number
        )
        rows = next(of_pass, range(len(relative)))
        return rows.start + int(relative[rows.start : rows.stop].argmax())

    @cached_property
    def _severities(self) -> dict[tuple[int, int], float]:
        """Return how far each pass is over the limit, by batch and step: above 1 it is wrong.

        A pass has at least the noise of all passes. Without rows and exact values, no pass is known.
        """
        limits = {item.statistic: item for item in self.ratios}
        # The two that follow from the norms of a pass's rows.
        of_port, of_row = limits.get("accumulated"), limits.get("replay-row")
        of_noise = dict(_rows_by_pass(self.noise)) if self.noise else {}
        found = {}
        for at, rows in _rows_by_pass(self.result):
            severity = 0.0
            if of_port:
                known = _pooled_error(of_noise[at]) if at in of_noise else 0.0
                error, noise = _pooled_error(rows), at_least(of_port.expected, known)
                severity = replace(of_port, actual=error, expected=noise).severity
            if of_row:
                worst = float(rows.relative().nan_to_num(math.inf).max())
                severity = max(severity, replace(of_row, actual=worst).severity)
            found[at] = severity
        if self.result.first_different is not None:
            found[self.result.first_different] = math.inf
        return found

    @cached_property
    def first_bad_pass(self) -> tuple[int, int] | None:
        """Return batch and step of the first pass that is over a limit; None if no single pass is."""
        return min((at for at, severity in self._severities.items() if severity > 1), default=None)

    def differs_by(self, at: tuple[int, int]) -> bool:
        """Return True if this differs in a pass up to `at`, or if only all passes together show it.

        A later module may amplify an error, and exceed its limit in an earlier pass.
        """
        if self.agrees:
            return False
        if self.first_bad_pass is None:
            return True
        return any(known <= at and value > _CARRIED for known, value in self._severities.items())


def _rows_by_pass(result: PortResult) -> Iterator[tuple[tuple[int, int], RowErrors]]:
    """Yield batch and step of each pass that has rows, with its rows."""
    rows = RowErrors.concatenate(result.sums.rows)
    start = 0
    for at, number in result.passes:
        if 0 < number <= len(rows.error) - start:
            chosen = slice(start, start + number)
            yield at, RowErrors(*(getattr(rows, name)[chosen] for name in RowErrors.__slots__))
        start += number


def _pooled_error(rows: RowErrors) -> float:
    """Return the relative error of all rows together; inf or nan if it is not finite."""
    error = float(rows.error.norm())
    return error / float(rows.expected.norm().clamp_min(sys.float_info.min)) if error else 0.0


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
    results = sorted(
        [(port, result) for port in ports for result in measured.of(port)],
        key=lambda item: (item[1].step, _PHASES.index(item[0].phase)),
    )
    deepest = max((count_blocks(port.module) for port, _ in results), default=0)
    law = NoiseLaw(unit_roundoff, max(deepest, num_blocks), _pool_drifts(measured.drift))
    expected_errors = _expect_errors(results, law, num_blocks, is_ordered=is_ordered)
    noise_of = {
        (port, one.step): one for port in ports if noise for one in reversed(noise.of(port))
    }
    judged = []
    for order, ((port, result), expected) in enumerate(zip(results, expected_errors, strict=True)):
        reference = noise_of.get((port, result.step))
        named = {
            name: value
            for name, value in metrics.get((port, result.rank), {}).items()
            if name in limits.by_statistic
        }
        ratios = _ratios(port, result, reference, limits, expected, unit_roundoff, named)
        error = measured.norm_errors.get((port, result.rank, result.step))
        if error is not None:
            ratios.append(_norm_ratio(error, reference, expected))
        if ratios:
            by_limits = (
                one.judged(1.0 if one.statistic in named else limits.of(one.statistic))
                for one in ratios
            )
            judged.append(JudgedPort(port, order, result, tuple(by_limits), expected, reference))
    return judged


def _pool_drifts(drift: Sequence[tuple[int, float, float]]) -> dict[int, float]:
    """Return the relative difference of all parameters at the start of each training step."""
    pooled: dict[int, NormSums] = {}
    for step, dd, ee in drift:
        sums = pooled.setdefault(step, NormSums())
        sums.dd += dd
        sums.ee += ee
    return {step: sums.relative_error for step, sums in pooled.items()}


def _expect_errors(
    results: Sequence[tuple[Port, PortResult]], law: NoiseLaw, num_blocks: int, *, is_ordered: bool
) -> Iterator[float]:
    """Yield the expected relative error of each result. An update has that of its measured gradient."""
    gradient_errors: dict[tuple[str, str], float] = {}
    depth = 0 if is_ordered else num_blocks
    for port, result in results:
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
        yield expected


def _ratios(
    port: Port, result: PortResult, noise: PortResult | None, limits: Limits, expected: float,
    unit_roundoff: float, metrics: Mapping[Statistic, float],
) -> list[Ratio]:  # fmt: skip
    sums, exact = result.sums, result.exact
    found = []
    if exact.num_compared:
        found.append(Ratio("exact", exact.num_different / exact.num_compared, 0.0))
    if port.direction == "parameter" and port.phase == "forward":
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


def _norm_ratio(error: float, noise: PortResult | None, expected: float) -> Ratio:
    if math.isnan(error):
        return Ratio("non-finite", error, 0.0)
    return Ratio("norm-error", error, (noise.sums.relative_error if noise else 0.0) or expected)


def _accumulated_ratios(actual: PairSums, noise: PairSums, unit_roundoff: float) -> Iterator[Ratio]:
    """Yield the statistics of an accumulated error: no value was injected on the way."""
    if not noise.rows:  # EXPECTED records the norms of its noise only
        known = at_least(TENSOR_FLOOR * unit_roundoff, noise.relative_error)
        yield Ratio("accumulated", actual.relative_error, known)
        return
    for ratio in error_ratios(actual, noise, unit_roundoff):
        if ratio.statistic == "replay-tensor":  # the same, under the name that says so
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


def is_inside(module: str, outer: str) -> bool:
    """Return True if `module` is a descendant of `outer`."""
    return module != outer and (not outer or module.startswith(f"{outer}."))
