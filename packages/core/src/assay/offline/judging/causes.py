"""The cause of a difference: location, diagnosis, and first affected token."""

from collections.abc import Sequence
from dataclasses import dataclass

from assay.metrics import RowErrors
from assay.offline.judging.judged_ports import JudgedPort
from assay.offline.judging.locating import Origin
from assay.offline.measured_dumps import MeasuredDumps
from assay.offline.measuring.quantized_layers import QuantizedLayer
from assay.offline.ports.lanes import Port
from assay.offline.replaying import Replayed
from assay.sites import Phase
from assay.verdicts import Diagnosis, Location, TokenPosition

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
