"""Location of the first wrong module from its inputs and outputs, its diagnosis, and doubtful pairs.

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
from assay.metrics import PairSums, RowErrors
from assay.noise import (
    TENSOR_FLOOR,
    at_least,
    channel_ratio,
    error_beyond,
    error_ratios,
)
from assay.offline.expected_noise import NoiseLaw, adam_error, count_blocks
from assay.offline.judging.judged_ports import JudgedPort
from assay.offline.measured_dumps import MeasuredDumps
from assay.offline.measuring.measured import MeasuredPorts
from assay.offline.measuring.metrics import MetricValues
from assay.offline.measuring.pair_values import QuantizedLayer
from assay.offline.pairing.port_series import BLOCK, LanePair, Port, without_numbers
from assay.offline.replaying import Replayed
from assay.sites import Phase
from assay.statistics import Statistic
from assay.verdicts import Diagnosis, Location, Ratio, TokenPosition

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


# A smaller share of a sum of squares is rounding.
_ZERO = 1e-9

# Training phases with a diagnosis of their own.
_DIAGNOSES: dict[Phase, Diagnosis] = {
    "inputs": "inputs-differ", "reduce": "missing-reduction", "clip": "clip-norm",
    "optimizer": "optimizer-update",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DumpEvidence:
    """The findings of a comparison of two dumps, from which it is judged."""

    dumps: MeasuredDumps
    replayed: Replayed | None
    """The replay of ACTUAL; None without --model."""
    quantized: Sequence[QuantizedLayer]
    """Layers that only one side quantizes, in order."""
    unmatched_expected: list[str]
    """Expected items without a partner that --allow-unmatched does not excuse."""
    problems: list[str]
    """Defects of either dump, such as missing files."""
    notes: list[str]


def find_cause(
    evidence: DumpEvidence,
    judged: Sequence[JudgedPort],
    weights: list[JudgedPort],
    origin: Origin | None,
) -> tuple[Location | None, Diagnosis | None]:
    """Return location and diagnosis of the earliest cause: prompts, weights, modules, then the sampler."""
    pairing = evidence.dumps.pairing
    if pairing.tokens.different_prompts or pairing.alignment.is_unrelated:
        return Location(phase="inputs"), "inputs-differ"
    if weights:
        port = weights[0].port
        name = port.name.removeprefix("parameter.")
        parameter = f"{port.module}.{name}" if port.module else name
        location = Location(
            phase="forward", module=port.module, parameter=parameter, rank=weights[0].result.rank
        )
        return location, "weight-mismatch"
    if origin is not None:
        if origin.evidence == "unlike":
            return locate(evidence, origin.judged), "missing-reduction"
        is_given = origin.evidence == "given"
        return _diagnose(evidence, judged, origin.judged, is_given=is_given)
    if any(one.is_near_tie is False for one in pairing.tokens.different_generated):
        return Location(phase="sampler"), "sampler"
    return None, None


def _diagnose(
    evidence: DumpEvidence, judged: Sequence[JudgedPort], origin: JudgedPort, *, is_given: bool
) -> tuple[Location, Diagnosis]:
    location, phase = locate(evidence, origin), origin.port.phase
    if is_given:
        return location.model_copy(update={"phase": "inputs"}), "inputs-differ"
    if location.op is None:
        location = location.model_copy(update={"op": _first_operation(judged, origin)})
    if origin.worst.statistic == "non-finite":
        return location, "non-finite"
    step = origin.result.step
    updated = (origin.port.module, "update", step - 1)
    if phase == "forward" and any(
        (one.port.module, one.port.direction, one.result.step) == updated for one in judged
    ):
        # The same code agreed with the parameters of earlier steps.
        location = location.model_copy(update={"phase": "optimizer", "step": step - 1})
        return location, "optimizer-update"
    if phase not in _DIAGNOSES:
        return location, "module-error"
    frozen = [one for one in judged if one.result.step == origin.result.step and _is_frozen(one)]
    if frozen:  # parameters outside of the optimizer are not clipped either
        return locate(evidence, frozen[0]), "frozen-parameters"
    others = [
        one
        for one in judged
        if (one.port.phase, one.port.direction, one.result.step)
        == (phase, origin.port.direction, origin.result.step)
    ]
    if len(others) > 1 and not any(one.agrees for one in others):
        location = Location(phase=phase, step=location.step, rank=location.rank)
    return location, _DIAGNOSES[phase]


def _operation_name(port: Port) -> str:
    return port.name.split(".")[2]


def _first_operation(judged: Sequence[JudgedPort], origin: JudgedPort) -> str | None:
    """Return the first operation in the module's own code that differs."""
    operations = (
        _operation_name(one.port)
        for one in judged
        if one.port.direction == "op" and one.call == origin.call and not one.agrees
    )
    return next(operations, None)


def _is_frozen(one: JudgedPort) -> bool:
    """Return True for a parameter that only ACTUAL leaves unchanged."""
    sums = one.result.sums
    squares_of_actual = sums.dd + 2 * sums.de + sums.ee
    return one.port.direction == "update" and sums.ee > 0 and squares_of_actual < _ZERO * sums.ee


def locate(evidence: DumpEvidence, judged: JudgedPort) -> Location:
    """Return the location of a judged port, with the first step that differs."""
    port = judged.port
    op = _operation_name(port) if port.direction == "op" else None
    op = port.direction if port.direction == "loss" else op
    step = judged.first_bad_pass[1] if judged.first_bad_pass else judged.result.step
    if not judged.result.passes:  # replayed
        step = judged.result.step or _step_of(evidence, *_first_row(judged))
    rank = judged.result.rank
    short = port.name.partition(".")[2] if port.is_of_parameter else ""
    parameter = ".".join(filter(None, (port.module, short))) if short else None
    return Location(
        phase=port.phase, step=step, rank=rank, module=port.module, op=op, parameter=parameter
    )


def describe_given(evidence: DumpEvidence, origin: Origin | None) -> str:
    """Name an input that differs, and the side that lacks it; return "" for another origin."""
    if origin is None or origin.evidence != "given":
        return ""
    port, matching = origin.judged.port, evidence.dumps.pairing.matching
    text = f"{port.name.removeprefix('input.')} of {port.module or '(model)'}"
    for side, lanes in (("ACTUAL", matching.absent_masks), ("EXPECTED", matching.extra_masks)):
        if any(lane.port == port for lane in lanes):
            return f"{text} is absent in {side}"
    return f"{text} differs"


def _first_row(judged: JudgedPort) -> tuple[int, int]:
    """Return prompt and position of the first row over the limit, or of the worst row."""
    if judged.result.exact.num_different:
        return judged.result.exact.first
    rows, bad = RowErrors.concatenate(judged.result.sums.rows), judged.first_bad_row
    return (-1, -1) if bad is None else (int(rows.prompt[bad]), int(rows.position[bad]))


def _step_of(evidence: DumpEvidence, prompt: int, position: int) -> int:
    for pair in evidence.dumps.pairing.alignment.pairs:
        rows = pair.expected.rows
        held = rows.positions[rows.prompts.index(prompt)] if rows and prompt in rows.prompts else ()
        if position in held:
            return pair.expected.step
    return 0


def find_first_bad_token(
    evidence: DumpEvidence, judged: Sequence[JudgedPort], origin: Origin | None
) -> TokenPosition | None:
    """Return the first different token, or the first whose logits are over their limit."""
    for different in evidence.dumps.pairing.tokens.different:
        phase = "prefill" if different.is_prompt else "decode"
        return TokenPosition(prompt=different.prompt, position=different.position, phase=phase)
    logits = [one for one in judged if one.port.level == "logits" and not one.agrees]
    source = logits[0] if logits else origin.judged if origin else None
    if source is None or source.port.direction == "parameter":
        return None
    prompt, position = _first_row(source)
    if prompt < 0 or position < 0:
        return None
    step = locate(evidence, source).step
    return TokenPosition(prompt=prompt, position=position, phase="decode" if step else "prefill")


Doubt = tuple[JudgedPort, LanePair]


def find_doubts(judged: Sequence[JudgedPort], pairs: Sequence[LanePair]) -> list[Doubt]:
    """Return the different ports whose pair is a guess that later results refute.

    A guess that is refuted in one block is refuted in all of them, unless it holds in one.
    """
    pair_of = {pair.port: pair for pair in pairs}
    failed = [
        one
        for one in judged
        if not one.agrees and one.port.phase == "forward"
        if one.port in pair_of and _is_guess(pair_of[one.port])
    ]
    known = [one for one in judged if one.port in pair_of]
    agreeing = [one for one in known if one.agrees and one.result.sums.ee]
    confirmed = {_pattern(pair_of[one.port]) for one in agreeing}
    refuted = {
        _pattern(pair_of[one.port])
        for one in failed
        if any(_depends_on(other, one, pair_of) for other in agreeing)
    } - confirmed
    return [(one, pair_of[one.port]) for one in failed if _pattern(pair_of[one.port]) in refuted]


def _is_guess(pair: LanePair) -> bool:
    is_renamed = pair.expected.port.name != pair.actual.port.name
    return pair.is_guess or (pair.port.direction == "input" and is_renamed)


def _pattern(pair: LanePair) -> tuple[str, ...]:
    """Return the ports of a pair, alike in all blocks."""
    return tuple(without_numbers(str(one.port)) for one in (pair.expected, pair.actual))


def _depends_on(later: JudgedPort, one: JudgedPort, pair_of: Mapping[Port, LanePair]) -> bool:
    """Return True if `later` is a value that an error of `one` would change."""
    if (later.result.rank, later.result.step) != (one.result.rank, one.result.step):
        return False
    if later.port.direction != "output":
        return later.port.direction == "input" and _is_same_in_expected(later, one)
    # A part of a fused module is reported by ACTUAL's name.
    module, outer = (pair_of[item.port].expected.port.module for item in (one, later))
    if later.port.level == "logits" or is_inside(module, outer):
        return True
    if one.port.direction == "input" and module == outer:
        return True
    own, block = BLOCK.match(module), BLOCK.fullmatch(outer)
    is_same_list = block is not None and (own is None or own[1] == block[1])
    return is_same_list and later.order > one.order


def _is_same_in_expected(later: JudgedPort, one: JudgedPort) -> bool:
    """Return True if EXPECTED passes the value of `one` on to `later`."""
    sums, others = one.result.sums, later.result.sums
    is_same = (sums.num_elements, sums.ee) == (others.num_elements, others.ee)
    return is_same and sums.ee > 0 and later.order > one.order
