"""Locating the first wrong module from outputs and inputs alone.

An error travels through all later modules. The module that makes it is the first whose inputs agree
within noise and whose output does not.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from torch import Tensor

from assay.comparing.levels import LEVEL_OF_PHASE, JudgedRatio
from assay.comparing.limits import Limits
from assay.comparing.results import PortResult
from assay.comparing.wording import dumps as wording
from assay.dtypes import FORMATS, float_format
from assay.metrics import PairSums
from assay.noise import TENSOR_FLOOR, Ratio, at_least, channel_ratio, error_ratios
from assay.offline.measuring.measured import Measured
from assay.offline.measuring.norm_sums import NormSums
from assay.offline.measuring.routing import ScoreNoise
from assay.offline.ports.lanes import Port
from assay.stages import Statistic

# By port and rank, the values of metrics.
MetricValues = Mapping[tuple[Port, int], Mapping[Statistic, float]]

# Relative error of a healthy run without a noise run: this many unit roundoffs, times the root of the
# number of blocks passed.
ROUNDOFFS = 4.0

# The same of gradients: sums over all tokens, whose terms cancel. A float32 step of a trained model of
# 4 blocks is up to 48 unit roundoffs per root of a block away from float64, in its k_proj.
TRAINING_ROUNDOFFS = 64.0

# Errors for each unit of relative error in the weights: 4 steps of AdamW on two ranks against one.
ACTIVATION_DRIFT = 2.0
GRADIENT_DRIFT = 4.0
# Relative size of an Adam step where weights are not recorded: learning rate 1e-3, weights of 0.05.
UPDATE_SIZE = 0.02


@dataclass(frozen=True, slots=True, eq=False)
class JudgedPort:
    """One port with its ratios. worst: the one furthest over its limit; None for exact values."""

    port: Port
    order: int
    result: PortResult
    ratios: tuple[JudgedRatio, ...]
    expected_noise: float = 0.0
    """Relative error of a healthy run, where there is no noise run."""

    @property
    def worst(self) -> JudgedRatio:
        """Return the ratio that is furthest over its limit, or nearest to it."""
        return max(self.ratios, key=lambda item: item.severity)

    @property
    def call(self) -> tuple[str, str, int, int]:
        """Return module, phase, rank and step, which the inputs and outputs of a module share."""
        return self.port.module, self.port.phase, self.result.rank, self.result.step

    @property
    def is_blind(self) -> bool:
        """Return True if noise is expected to be so large that a tensor of zeros would agree.

        Values that are equal need no noise to agree.
        """
        if self.result.sums.num_elements and not self.result.sums.dd:
            return False
        inexact = [item for item in self.ratios if item.ratio.expected]
        return bool(inexact) and all(item.resolution >= 1 for item in inexact)

    @property
    def agrees(self) -> bool:
        """Return True if no ratio is over its limit."""
        return not any(item.failed for item in self.ratios)


def level_of(port: Port) -> str:
    """Return the level that a port belongs to."""
    if port.phase != "forward":
        return LEVEL_OF_PHASE[port.phase]
    if port.direction == "parameter":
        return "weights"
    if port.direction == "op":
        return "operations"
    is_head = port.module.rpartition(".")[2] == "lm_head" and port.direction == "output"
    return "logits" if is_head or port.name.endswith("logits") else "modules"


@dataclass(frozen=True, slots=True)
class Origin:
    """The module where an error is made.

    evidence: "inputs agree" if its own inputs were compared; "growth" if only earlier results were.
    """

    judged: JudgedPort
    evidence: str


def judge_ports(
    results: Iterable[tuple[Port, PortResult]],
    noise: Mapping[tuple[Port, int], PortResult] | None,
    limits: Limits,
    unit_roundoff: float,
    norm_errors: Mapping[tuple[Port, int, int], float],
    metrics: MetricValues,
    num_blocks: int = 0,
    drift: Mapping[int, NormSums] = MappingProxyType({}),
) -> list[JudgedPort]:
    """Judge every port, in the order of the expected dump.

    norm_errors: by port, rank and step, of tensors that are compared by their norms.
    noise: by port and step, results of the noise dump; None to expect the error of a healthy run of its depth.
    unit_roundoff: of the coarser dtype of the two dumps.
    metrics: are judged if the limits name them. Their ratio is to the limit.
    num_blocks: of the network, which logits have passed even if no block is compared.
    drift: by training step, the difference of all parameters at its start.
    """
    judged = []
    results = list(results)
    deepest = max((count_blocks(port.module) for port, _ in results), default=0)
    drifts = {step: sums.relative_error for step, sums in drift.items()}
    law = NoiseLaw(unit_roundoff, max(deepest, num_blocks), drifts)
    gradient_errors: dict[tuple[str, str], float] = {}
    depth = 0
    for order, (port, result) in enumerate(results):
        if port.phase == "forward":
            depth = max(depth, count_blocks(port.module))
        if level_of(port) == "logits":
            depth = max(depth, num_blocks)
        expected = law.expected(port, count_blocks(port.module) or depth, result.step)
        parameter = port.module, port.name.partition(".")[2]
        if port.phase in ("backward", "clip"):
            known = gradient_errors.get(parameter, 0.0)
            gradient_errors[parameter] = max(known, result.sums.relative_error)
        if port.direction == "update":
            measured = gradient_errors.get(parameter)
            floor = law.gradient_roundoff if measured is not None else expected
            expected = adam_error(max(floor, measured or 0.0))
        reference = noise.get((port, result.step)) if noise is not None else None
        named = {
            name: value
            for name, value in metrics.get((port, result.rank), {}).items()
            if name in limits.by_statistic
        }
        ratios = tuple(
            JudgedRatio(ratio, 1.0 if ratio.statistic in named else limits.of(ratio.statistic))
            for ratio in _ratios(port, result, reference, limits, expected, unit_roundoff, named)
        )
        error = norm_errors.get((port, result.rank, result.step))
        if error is not None:
            ratio = _norm_ratio(error, reference, expected)
            ratios += (JudgedRatio(ratio, limits.of(ratio.statistic)),)
        if ratios:
            judged.append(JudgedPort(port, order, result, ratios, expected))
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
    """Yield the statistics of an error that was carried on: nothing was replaced on the way."""
    if not noise.rows:  # recorded with EXPECTED, which holds norms only
        known = at_least(TENSOR_FLOOR * unit_roundoff, noise.relative_error)
        yield Ratio("accumulated", actual.relative_error, known)
        return
    for ratio in error_ratios(actual, noise, unit_roundoff):
        if ratio.statistic == "replay-tensor":
            yield replace(ratio, statistic="accumulated")
        elif ratio.statistic == "replay-channel":
            # A channel of one token may be exact by chance: it has at least the tensor's noise.
            unit = max(unit_roundoff, noise.relative_error / TENSOR_FLOOR)
            yield channel_ratio(actual, noise, unit) or ratio
        # Where expected values are not finite, the rest of a row is no measure of it.
        elif ratio.statistic != "replay-row" or not actual.lacks_expected:
            yield ratio


def _norm_ratio(error: float, noise: PortResult | None, expected: float) -> Ratio:
    if math.isnan(error):
        return Ratio("non-finite", error, 0.0)
    measured = noise.sums.relative_error if noise is not None else 0.0
    return Ratio("norm-error", error, measured or expected)


@dataclass(frozen=True, slots=True)
class NoiseLaw:
    """The relative error of a healthy run where there is no noise run.

    drift: by training step, the relative difference of all parameters at its start.
    """

    unit_roundoff: float
    num_blocks: int = 0
    drift: Mapping[int, float] = field(default_factory=dict)

    def expected(self, port: Port, depth: int, step: int = 0) -> float:
        """Return the error at a place. depth: number of blocks before it; step: of training."""
        drift = self._drift_at(step)
        if port.phase == "forward":
            return (ROUNDOFFS * self.unit_roundoff + ACTIVATION_DRIFT * drift) * math.sqrt(
                1 + depth
            )
        # The backward pass goes through all blocks again.
        return self.gradient_roundoff + GRADIENT_DRIFT * drift * self._blocks

    @property
    def _blocks(self) -> float:
        return math.sqrt(1 + 2 * self.num_blocks)

    @property
    def gradient_roundoff(self) -> float:
        """Return the error of gradients from equal weights."""
        return TRAINING_ROUNDOFFS * self.unit_roundoff * self._blocks

    def _drift_at(self, step: int) -> float:
        if step in self.drift or not step:
            return self.drift.get(step, 0.0)
        return step * UPDATE_SIZE * adam_error(self.gradient_roundoff)


def adam_error(gradient_error: float) -> float:
    """Return the relative error of an update of Adam, from that of its gradient.

    Adam divides a gradient by its size: elements within their noise of zero move in either direction.
    """
    return math.sqrt(gradient_error)


def find_wrong_replicas(
    replica_errors: Mapping[tuple[Port, int], float], limits: Limits, unit_roundoff: float
) -> list[str]:
    """Return a sentence for each value of EXPECTED that its ranks must share, and do not.

    replica_errors: by port and rank, the relative difference from the first rank.
    """
    deepest = max((count_blocks(port.module) for port, _ in replica_errors), default=0)
    law = NoiseLaw(unit_roundoff, deepest)

    def limit(port: Port) -> float:
        if port.direction == "parameter" or not limits.names_noise_ratios:
            return 0.0
        return limits.of("accumulated") * law.expected(port, count_blocks(port.module) or deepest)

    return [
        wording.describe_wrong_replica(str(port), rank, error)
        for (port, rank), error in replica_errors.items()
        if error > limit(port)
    ]


def expected_score_noise(unit_roundoff: float) -> ScoreNoise:
    """Return the noise of a router's scores that their dtype and depth let expect."""

    def noise(port: Port, scores: Tensor) -> float:
        expected = NoiseLaw(unit_roundoff).expected(port, count_blocks(port.module))
        return expected * float(scores.double().pow(2).mean().sqrt())

    return noise


def measured_score_noise(noise: Measured, otherwise: ScoreNoise) -> ScoreNoise:
    """Return the noise of a router's scores in a noise dump; `otherwise` where it lacks them."""

    def measured(port: Port, scores: Tensor) -> float:
        found = noise.of(port)
        if not found or not found[0].sums.num_elements:
            return otherwise(port, scores)
        return math.sqrt(found[0].sums.dd / found[0].sums.num_elements)

    return measured


def count_blocks(module: str) -> int:
    """Return the number of repeated blocks before a module, from the first number in its path."""
    number = re.search(r"\.(\d+)(?:\.|$)", module)
    return int(number[1]) + 1 if number else 0


def find_origins(judged: Sequence[JudgedPort], absent_masks: Collection[Port]) -> list[Origin]:
    """Return the modules that make an error, in order; the first one is the place to name.

    A module around another one of them is left out: it differs because of its child. So is what
    follows the first training step that differs.
    """
    failed = [
        item
        for item in judged
        if not item.agrees and level_of(item.port) != "weights" and item.port not in absent_masks
    ]
    if failed and failed[0].worst.ratio.statistic == "non-finite":
        # A NaN in padding is harmless where it is made, and spreads through attention.
        padding = [one for one in judged if one.result.num_nonfinite_padding]
        earlier = [one for one in padding if one.order < failed[0].order]
        if earlier:
            return [Origin(earlier[0], "growth")]
    given = _group_given(judged)
    found: list[Origin] = []
    for item in failed:
        if not _is_made(item.port) or item.result.step != failed[0].result.step:
            continue
        own = given.get(_given_key(item), [])
        if own and all(one.agrees for one in own):
            found.append(Origin(item, "inputs agree"))
        elif not own and item is failed[0]:
            found.append(Origin(item, "growth"))
    if not found:  # an operation whose error the results of its module do not show
        found = [Origin(item, "growth") for item in failed if item.port.direction == "op"][:1]
    places = [(one.judged.port.phase, one.judged.port.module) for one in found]
    found = [
        one
        for one in found
        if not any(
            phase == one.judged.port.phase and is_inside(module, one.judged.port.module)
            for phase, module in places
        )
    ]
    return found or [Origin(item, "growth") for item in failed[:1]]


def _is_given(port: Port) -> bool:
    """Return True for what a module is given. Backward goes from outputs to inputs."""
    return port.direction == {"forward": "input", "backward": "output"}.get(port.phase)


def _is_made(port: Port) -> bool:
    """Return True for what a module or phase makes."""
    if port.is_of_parameter:
        return True
    made = {"forward": "output", "backward": "input"}.get(port.phase)
    return made is None or port.direction == made


def _given_key(item: JudgedPort) -> tuple[object, ...]:
    """Return what the result of a place shares with what it was computed from."""
    if item.port.is_of_parameter and item.port.phase != "backward":
        return (*item.call[:1], item.port.name.partition(".")[2], *item.call[1:])
    return item.call


def _group_given(judged: Sequence[JudgedPort]) -> dict[tuple[object, ...], list[JudgedPort]]:
    """Return by `_given_key` the places from which a result was computed.

    A phase after backward is given the gradient of the last phase before it.
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


def coarser_unit(dtypes: Iterable[str]) -> float:
    """Return the largest unit roundoff of floating dtypes; that of float32 if there are none."""
    units = [float_format(name).unit_roundoff for name in dtypes if name in FORMATS]
    return max(units, default=float_format("float32").unit_roundoff)
