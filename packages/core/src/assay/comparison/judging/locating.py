"""Location of the first wrong module from its inputs and outputs, its diagnosis, and doubtful pairs.

An error propagates through all later modules. The module that makes it is the first whose inputs agree
within noise and whose output does not.
"""

import math
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from assay.comparison.judging.judged_ports import JudgedPort, is_inside
from assay.comparison.measured_dumps import MeasuredDumps
from assay.comparison.pairing.port_series import BLOCK, Port, SeriesPair, without_numbers
from assay.judge.levels import Cause
from assay.metrics import RowErrors
from assay.noise import error_beyond
from assay.sites import Phase
from assay.verdicts import Diagnosis, Location, Ratio, TokenPosition

_NEVER = (sys.maxsize, sys.maxsize)


@dataclass(frozen=True, slots=True)
class Origin:
    """The module that makes an error."""

    judged: JudgedPort
    evidence: str
    """`inputs agree` if its inputs were compared, `growth` if only earlier results were, or `replayed`.
    `given` for an input of the model that differs."""


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
    if not failed:
        return []
    first = failed[0]
    if first.worst.statistic == "non-finite":
        # A NaN in padding is harmless at its origin, and spreads through attention.
        padding = [one for one in judged if one.result.num_nonfinite_padding]
        earlier = [one for one in padding if one.order < first.order]
        if earlier:
            ratio = Ratio("non-finite", math.nan, 0.0).judged(0.0)
            return [Origin(replace(earlier[0], ratios=(ratio,)), "growth")]
    failed = [item for item in failed if item.result.step == first.result.step]
    if first.port.phase == "clip" and (unlike := _find_unlike(judged, failed)):
        return [Origin(item, "unlike") for item in unlike]
    start = _NEVER
    if first.port.phase == "forward":
        failed = [item for item in failed if item.port.phase == "forward"]
        known = [item.first_bad_pass for item in failed if item.first_bad_pass is not None]
        start = min(known, default=(0, first.result.step))
        failed = [item for item in failed if item.differs_by(start)]
    inputs = [Origin(one, "given") for one in _find_different_inputs(judged, start)[:1]]
    made = list(_find_made(judged, failed, start))
    if not (inputs or made):  # the error of an operation may not show in the output of its module
        made = [Origin(item, "growth") for item in failed if item.port.direction == "op"][:1]
    places = [one.judged.port for one in made]
    made = [
        one
        for one in made
        if not any(
            inner.phase == one.judged.port.phase and is_inside(inner.module, one.judged.port.module)
            for inner in places
        )
    ]
    return [*inputs, *made] or [Origin(item, "growth") for item in failed[:1]]


def _find_made(
    judged: Sequence[JudgedPort], failed: Sequence[JudgedPort], start: tuple[int, int]
) -> Iterator[Origin]:
    """Yield the results that differ though their inputs agree, and the first one if it has none."""
    given = _group_given(judged)
    for item in failed:
        own = given.get(_given_key(item), []) if _is_made(item.port) else None
        if own and not any(one.differs_by(start) for one in own):
            yield Origin(item, "inputs agree")
        elif own == [] and item is failed[0]:
            yield Origin(item, "growth")


# The container of repeated blocks, and the number of one.
_BLOCK = re.compile(r"(?:(.*?)\.)?(\d{1,9})(?:\.|$)")


def find_first_unordered(
    origins: list[Origin], failed: list[JudgedPort], judged: Sequence[JudgedPort]
) -> list[Origin]:
    """Return the only place that can be the first of several, if tensors are ordered by name; or [].

    It makes its error from equal inputs, or it is the only one in the first block that differs. If an earlier
    block agrees, places outside of the blocks differ because of it.
    """
    made_here = [one for one in origins if one.evidence != "growth"]
    if len(made_here) == 1 or len(failed) == 1:
        return made_here or origins
    inner = [
        one
        for one in failed
        if not any(is_inside(other.port.module, one.port.module) for other in failed)
    ]
    blocks = [(one, found) for one in inner if (found := _BLOCK.match(one.port.module))]
    first = min((int(found[2]) for _, found in blocks), default=0)
    in_first = [one for one, found in blocks if int(found[2]) == first]
    if len(in_first) != 1 or len({found[1] for _, found in blocks}) != 1:
        return []
    has_earlier = any(
        found[1] == blocks[0][1][1] and int(found[2]) < first
        for one in judged
        if (found := _BLOCK.match(one.port.module))
    )
    is_outside = any(
        not _BLOCK.match(one.port.module) for one in inner if one.port.level != "logits"
    )
    return [Origin(in_first[0], "growth")] if has_earlier or not is_outside else []


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
    judged: Sequence[JudgedPort], start: tuple[int, int]
) -> list[JudgedPort]:
    """Return the inputs that differ in the pass `start` or before, and that no module made.

    A mask of padding is passed on from module to module. Of the others, those of the model itself count.
    """
    if start == _NEVER:
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


@dataclass(frozen=True, slots=True)
class Findings:
    """The places where two dumps differ, from which the cause follows."""

    dumps: MeasuredDumps
    judged: Sequence[JudgedPort]
    weights: Sequence[JudgedPort]
    """Weights that differ."""
    failed: Sequence[JudgedPort]
    """Other places that differ."""
    origins: Sequence[Origin]

    @property
    def origin(self) -> Origin | None:
        """Return the first origin, which is the location; None if no place differs."""
        return self.origins[0] if self.origins else None


def find_cause(found: Findings) -> Cause:
    """Return diagnosis and location by the first rule that applies."""
    places = ((diagnosis, locate_by(found)) for diagnosis, locate_by in _RULES)
    return next((Cause(*one) for one in places if one[1] is not None), Cause(None))


def _in_prompts(found: Findings) -> Location | None:
    pairing = found.dumps.pairing
    differ = pairing.tokens.different_prompts or pairing.alignment.is_unrelated
    return Location(phase="inputs") if differ else None


def _in_weights(found: Findings) -> Location | None:
    if not found.weights:
        return None
    return locate(found.dumps, found.weights[0]).model_copy(update={"step": 0})


def _in_unlike_gradient(found: Findings) -> Location | None:
    if found.origin is None or found.origin.evidence != "unlike":
        return None
    return locate(found.dumps, found.origin.judged)


def _in_given_input(found: Findings) -> Location | None:
    if found.origin is None or found.origin.evidence != "given":
        return None
    return locate(found.dumps, found.origin.judged).model_copy(update={"phase": "inputs"})


def _in_nonfinite(found: Findings) -> Location | None:
    if found.origin is None or found.origin.judged.worst.statistic != "non-finite":
        return None
    return _locate_with_operation(found, found.origin.judged)


def _in_update_before(found: Findings) -> Location | None:
    """Locate the update before the first wrong step: earlier steps agree, so its code is right."""
    if found.origin is None or found.origin.judged.port.phase != "forward":
        return None
    origin = found.origin.judged
    step = origin.result.step - 1
    updated = origin.port.module, "update", step
    if updated not in {(o.port.module, o.port.direction, o.result.step) for o in found.judged}:
        return None
    location = _locate_with_operation(found, origin)
    return location.model_copy(update={"phase": "optimizer", "step": step})


def _in_module(found: Findings) -> Location | None:
    if found.origin is None or found.origin.judged.port.phase in _PHASES_OF_TRAINING:
        return None
    return _locate_with_operation(found, found.origin.judged)


def _in_frozen_parameter(found: Findings) -> Location | None:
    """Locate the first parameter that only ACTUAL leaves unchanged. It is not clipped either."""
    step = found.origin.judged.result.step if found.origin else None
    frozen = [one for one in found.judged if one.result.step == step and _is_frozen(one)]
    return locate(found.dumps, frozen[0]) if frozen else None


def _in_phase(found: Findings, phase: Phase) -> Location | None:
    """Locate a parameter that differs, or the phase if all parameters do."""
    if found.origin is None or found.origin.judged.port.phase != phase:
        return None
    origin = found.origin.judged
    location = _locate_with_operation(found, origin)
    others = [
        one
        for one in found.judged
        if (one.port.phase, one.port.direction, one.result.step)
        == (phase, origin.port.direction, origin.result.step)
    ]
    if len(others) > 1 and not any(one.agrees for one in others):
        return Location(phase=phase, step=location.step, rank=location.rank)
    return location


def _in_sampler(found: Findings) -> Location | None:
    generated = found.dumps.pairing.tokens.different_generated
    is_wrong = any(one.is_near_tie is False for one in generated)
    return Location(phase="sampler") if is_wrong else None


# The phases of a training step around forward and backward.
_PHASES_OF_TRAINING: tuple[Phase, ...] = ("inputs", "reduce", "clip", "optimizer")

# The first rule that finds a place names the cause: prompts, weights, modules, phases, then the sampler.
_RULES: tuple[tuple[Diagnosis, Callable[[Findings], Location | None]], ...] = (
    ("inputs-differ", _in_prompts),
    ("weight-mismatch", _in_weights),
    ("missing-reduction", _in_unlike_gradient),
    ("inputs-differ", _in_given_input),
    ("non-finite", _in_nonfinite),
    ("optimizer-update", _in_update_before),
    ("module-error", _in_module),
    ("frozen-parameters", _in_frozen_parameter),
    ("inputs-differ", lambda found: _in_phase(found, "inputs")),
    ("missing-reduction", lambda found: _in_phase(found, "reduce")),
    ("clip-norm", lambda found: _in_phase(found, "clip")),
    ("optimizer-update", lambda found: _in_phase(found, "optimizer")),
    ("sampler", _in_sampler),
)

# A smaller share of a sum of squares is rounding.
_ZERO = 1e-9


def _locate_with_operation(found: Findings, origin: JudgedPort) -> Location:
    """Return the location of a port, with the first operation in its module's own code that differs."""
    location = locate(found.dumps, origin)
    operations = (
        _operation_name(one.port)
        for one in found.judged
        if one.port.direction == "op" and one.call == origin.call and not one.agrees
    )
    return location.model_copy(update={"op": location.op or next(operations, None)})


def _operation_name(port: Port) -> str:
    return port.name.split(".")[2]


def _is_frozen(one: JudgedPort) -> bool:
    """Return True for a parameter that only ACTUAL leaves unchanged."""
    sums = one.result.sums
    squares_of_actual = sums.dd + 2 * sums.de + sums.ee
    return one.port.direction == "update" and sums.ee > 0 and squares_of_actual < _ZERO * sums.ee


def locate(dumps: MeasuredDumps, judged: JudgedPort) -> Location:
    """Return the location of a judged port, with the first step that differs."""
    port = judged.port
    op = _operation_name(port) if port.direction == "op" else None
    op = port.direction if port.direction == "loss" else op
    step = judged.first_bad_pass[1] if judged.first_bad_pass else judged.result.step
    if not judged.result.passes:  # replayed
        step = judged.result.step or _step_of(dumps, *_first_row(judged))
    rank = judged.result.rank
    short = port.name.partition(".")[2] if port.is_of_parameter else ""
    parameter = ".".join(filter(None, (port.module, short))) if short else None
    return Location(
        phase=port.phase, step=step, rank=rank, module=port.module, op=op, parameter=parameter
    )


def describe_given(found: Findings) -> str:
    """Name an input that differs, and the side that lacks it; return "" for another origin."""
    if found.origin is None or found.origin.evidence != "given":
        return ""
    port, matching = found.origin.judged.port, found.dumps.pairing.matching
    text = f"{port.name.removeprefix('input.')} of {port.module or '(model)'}"
    for side, masks in (("ACTUAL", matching.absent_masks), ("EXPECTED", matching.extra_masks)):
        if any(series.port == port for series in masks):
            return f"{text} is absent in {side}"
    return f"{text} differs"


def _first_row(judged: JudgedPort) -> tuple[int, int]:
    """Return prompt and position of the first row over the limit, or of the worst row."""
    if judged.result.exact.num_different:
        return judged.result.exact.first
    rows, bad = RowErrors.concatenate(judged.result.sums.rows), judged.first_bad_row
    return (-1, -1) if bad is None else (int(rows.prompt[bad]), int(rows.position[bad]))


def _step_of(dumps: MeasuredDumps, prompt: int, position: int) -> int:
    for pair in dumps.pairing.alignment.pairs:
        rows = pair.expected.rows
        held = rows.positions[rows.prompts.index(prompt)] if rows and prompt in rows.prompts else ()
        if position in held:
            return pair.expected.step
    return 0


def find_first_bad_token(found: Findings) -> TokenPosition | None:
    """Return the first different token, or the first whose logits are over their limit."""
    for different in found.dumps.pairing.tokens.different:
        phase = "prefill" if different.is_prompt else "decode"
        return TokenPosition(prompt=different.prompt, position=different.position, phase=phase)
    logits = [one for one in found.judged if one.port.level == "logits" and not one.agrees]
    source = logits[0] if logits else found.origin.judged if found.origin else None
    if source is None or source.port.direction == "parameter":
        return None
    prompt, position = _first_row(source)
    if prompt < 0 or position < 0:
        return None
    step = locate(found.dumps, source).step
    return TokenPosition(prompt=prompt, position=position, phase="decode" if step else "prefill")


Doubt = tuple[JudgedPort, SeriesPair]


def find_doubts(judged: Sequence[JudgedPort], pairs: Sequence[SeriesPair]) -> list[Doubt]:
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


def _is_guess(pair: SeriesPair) -> bool:
    is_renamed = pair.expected.port.name != pair.actual.port.name
    return pair.is_guess or (pair.port.direction == "input" and is_renamed)


def _pattern(pair: SeriesPair) -> tuple[str, ...]:
    """Return the ports of a pair, alike in all blocks."""
    return tuple(without_numbers(str(one.port)) for one in (pair.expected, pair.actual))


def _depends_on(later: JudgedPort, one: JudgedPort, pair_of: Mapping[Port, SeriesPair]) -> bool:
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
