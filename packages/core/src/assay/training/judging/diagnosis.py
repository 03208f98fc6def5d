"""Diagnoses an error by its signature: the stages that fail together, and the form of their errors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from assay.comparing.judge import FailedStage, Judged
from assay.comparing.levels import DiagnosedFault
from assay.errors import name_alike
from assay.locating.gradients import LabelDifference
from assay.sites import Phase
from assay.training.judging.evidence import (
    PARAMETER_PREFIX,
    UPDATE_PREFIX,
    FreeEvidence,
    JudgedGroup,
    TrainEvidence,
    bad_steps,
    describe_steps,
    location_of,
    location_of_parameter,
    parameter_of,
)
from assay.training.judging.free_run import RESUMED_TRAJECTORY
from assay.training.judging.signature import (
    LEAST_PART,
    SAME_SUM,
    Signature,
    find_kept_gradients,
    find_wrong_rank_shares,
    find_wrong_shares,
    is_clipped_in_backward,
    is_clipped_in_reduce,
    is_divided_by_another_factor,
    is_norm_off_by_one_factor,
    stands_still,
)
from assay.training.protocol import PHASE_METHODS
from assay.training.replay.step_values import NORM
from assay.verdicts import Diagnosis, Location


def diagnose_replay(
    evidence: TrainEvidence, groups: dict[str, JudgedGroup], origin: FailedStage
) -> DiagnosedFault:
    """Diagnose the replayed steps; `origin` is the stage that makes the error."""
    failed = [item for group in groups.values() for item in group.failed]
    case = Signature(evidence, groups, origin, location_of(origin, failed, evidence.rows))
    found = (find(case) for phases, find in _RULES if case.phase in phases)
    return next(fault for fault in found if fault is not None)


def _find_untied(case: Signature) -> DiagnosedFault | None:
    shared = case.evidence.report.model.shared
    lost = [names for names in case.evidence.reference.shared if names not in shared]
    # The shared table belongs to the embedding; the copy belongs to the head.
    return DiagnosedFault("untied-parameters", case.at(lost[0][0])) if lost else None


def _find_other_weights(case: Signature) -> DiagnosedFault | None:
    here, different = case.here, case.evidence.report.model.weights_different
    if here.phase == "optimizer" and here.parameter in different:
        # Only the first replayed step starts from the candidate's own weights. If no input reaches a
        # different weight, only the update of that step shows it.
        at_first = bad_steps(case.origin.reported, case.evidence.rows) == [0]
        return _weight_mismatch(here.parameter) if at_first else None
    own = [name for name in different if name.rpartition(".")[0] == here.module]
    if not own or here.phase not in ("forward", "backward"):
        return None
    return DiagnosedFault("weight-mismatch", case.at(own[0]))


def diagnose_free_run(evidence: FreeEvidence, failed: list[Judged]) -> DiagnosedFault:
    """Diagnose a free run with another end, if each stage of each step is correct by itself.

    failed: its losses and trajectories over their limits; at least one.
    """
    if all(item.port.port.startswith(RESUMED_TRAJECTORY) for item in failed):
        location = Location(phase="checkpoint", step=evidence.options.resume_at)
        return DiagnosedFault("checkpoint-mismatch", location)
    elsewhere = [parameter_of(item) for item in sorted(failed, key=lambda item: -item.severity)]
    different = evidence.report.model.weights_different
    if different:
        # Only the first replayed step starts from them.
        named = [name for name in elsewhere if name in different]
        return _weight_mismatch((named or different)[0])
    return DiagnosedFault("optimizer-update", Location(phase="optimizer"))


def _weight_mismatch(parameter: str) -> DiagnosedFault:
    return DiagnosedFault("weight-mismatch", location_of_parameter("forward", parameter))


def _find_frozen(case: Signature) -> DiagnosedFault | None:
    """Find parameters that do not move, although the noise run moves them."""
    group = case.groups["stage-optimizer"]
    if left_out := find_left_out(case.evidence, group):
        return left_out
    names = _standing_still(group, UPDATE_PREFIX)
    return _frozen(case.evidence, names, "do not move") if names else None


def _find_without_gradient(case: Signature) -> DiagnosedFault | None:
    """Find parameters whose gradients are all zero, and the reference's are not."""
    names = _standing_still(case.group, PARAMETER_PREFIX)
    if case.here.parameter not in names or (case.phase == "clip" and not case.hides_backward):
        return None
    found = _frozen(case.evidence, names, "get no gradient")
    is_all = len(names) >= case.evidence.reference.num_trainable
    place = case.everywhere if is_all else case.at(names[0])
    return replace(found, location=place.model_copy(update=_BACKWARD))


def _find_shares(case: Signature) -> DiagnosedFault | None:
    shares = find_wrong_shares(case.evidence)
    if shares is not None and shares.diagnosis == "loss-scale" and case.is_of_loss():
        return replace(shares, location=case.here.model_copy(update=_BACKWARD))
    return shares


def _find_wrong_sums(case: Signature) -> DiagnosedFault | None:
    """Find wrong gradients that are not the sum of what backward passes give, by the worst one.

    If the sum is right, its parts are wrong, and the module that computes them is at fault.
    """
    errors = case.evidence.report.gradients.errors_of_sums
    lost = [name for name in case.wrong_gradients if not errors.get(name, 0.0) <= LEAST_PART]
    if not lost or not case.are_sums_wrong():
        return None
    worst = min(lost, key=lambda name: (-errors[name], name))
    place = case.everywhere if len(lost) == len(errors) else case.at(worst)
    return DiagnosedFault("missing-reduction", place)


def _find_gap(case: Signature) -> DiagnosedFault | None:
    """Find gradients that change between the last backward pass and the next visible phase."""
    wrong, report = case.wrong_gradients, case.evidence.report
    names, changed = list(wrong), report.gradients.changed
    if case.phase == "clip":  # which multiplies all gradients by one factor
        if any(port.port == NORM for port in case.group.ports):
            return None
        names = case.list_unlike()
        later = "the optimizer step, where no method shows clipping,"
        is_possible = 2 * len(names) < len(case.gradients)
        is_possible &= not case.hides_backward or all(name in changed for name in names)
    else:
        later = PHASE_METHODS["reduce" if "reduce" in report.replay.seen else "clip"]
        # The largest change of a step is at least as large as the error of all steps together.
        is_possible = all(changed.get(name, 0.0) >= error / 2 for name, error in wrong.items())
        is_possible &= case.are_sums_wrong() and not report.replay.scaled_steps
    if not names or not is_possible:
        return None
    words = (
        f"between the last backward pass and {later} the gradients of {name_alike(names)} change"
    )
    if factor := case.factor():
        return DiagnosedFault("loss-scale", case.everywhere, f"{words}: {factor}")
    place = case.everywhere if 2 * len(names) > len(case.gradients) else case.at(names[0])
    return DiagnosedFault("missing-reduction", place, words)


def _standing_still(group: JudgedGroup, prefix: str) -> list[str]:
    still = (item for item in group.judged if item.port.port.startswith(prefix))
    return sorted({parameter_of(item) for item in still if stands_still(item)})


def _frozen(evidence: TrainEvidence, names: list[str], how: str) -> DiagnosedFault:
    num_trained = evidence.reference.num_trainable
    reason = f"{len(names)} of {num_trained} trained parameters {how}: {name_alike(names)}"
    location = location_of_parameter("optimizer", names[0] if len(names) == 1 else None)
    return DiagnosedFault("frozen-parameters", location, reason)


def find_left_out(evidence: TrainEvidence, updates: JudgedGroup) -> DiagnosedFault | None:
    """Find parameters that the reference trains and that this run neither trains nor moves."""
    moved = {
        parameter_of(item)
        for item in updates.judged
        if item.port.port.startswith(UPDATE_PREFIX) and _moves(item)
    }
    report = evidence.report.model
    for names, how in (
        (report.frozen, "have requires_grad=False and get no gradient"),
        (report.not_in_optimizer, "are not in the optimizer"),
    ):
        if unmoved := [name for name in names if name not in moved]:
            return _frozen(evidence, unmoved, how)
    return None


def find_unexpectedly_trained(evidence: FreeEvidence) -> DiagnosedFault | None:
    """Find parameters that should not be trained, such as the base weights under an adapter."""
    names = evidence.report.model.unexpectedly_trained
    location = location_of_parameter("optimizer", names[0] if names else None)
    return DiagnosedFault("optimizer-update", location) if names else None


def _moves(item: Judged) -> bool:
    sums = item.port.sums
    return sums.ee + 2 * sums.de + sums.dd > SAME_SUM * (sums.ee + sums.dd)


_LABEL_FAULTS = {
    "not-shifted": "{count} labels are not shifted: each position is trained on its own token, not on"
    " the next one",
    "shifted-twice": "{count} labels are shifted twice: each position is trained on the token after the"
    " next one",
    "prompt": "prompts are trained on: {count} of their tokens are labels, which the reference masks",
    "padding": "padding is trained on: {count} labels, which the reference masks",
    "masked": "{count} labels are masked that the reference trains on",
    "other": "{count} labels are other tokens than the reference's",
}


def find_wrong_labels(labels: Sequence[LabelDifference]) -> DiagnosedFault | None:
    """Describe wrong labels and their rows. Return None if all labels agree."""
    if not labels:
        return None
    facts = []
    for fault, words in _LABEL_FAULTS.items():
        found = [one for one in labels if one.fault == fault]
        if found:
            count = sum(one.count for one in found)
            facts.append(f"{words.format(count=f'{count:,}')} ({_describe_rows(found)})")
    step = min(one.step for one in labels)
    location = Location(phase="inputs", step=step, module="")
    return DiagnosedFault("inputs-differ", location, f"labels: {'; '.join(facts)}")


def _describe_rows(labels: Sequence[LabelDifference]) -> str:
    """Describe the rows of the first step of `labels`, and the number of later steps."""
    first = min(one.step for one in labels)
    rows: dict[int, list[str]] = {}
    for one in sorted(labels, key=lambda one: (one.micro_batch, one.row)):
        if one.step == first and str(one.row) not in rows.setdefault(one.micro_batch, []):
            rows[one.micro_batch].append(str(one.row))
    places = ", ".join(
        f"micro-batch {number} row{'s' if len(found) > 1 else ''} {' and '.join(found)}"
        for number, found in rows.items()
    )
    return f"{places} of {describe_steps(one.step for one in labels)}"


_Finder = Callable[[Signature], DiagnosedFault | None]


def _if(
    applies: Callable[[Signature], bool],
    diagnosis: Diagnosis,
    words: Callable[[Signature], str | None] | None = None,
    at: Mapping[str, str | None] | None = None,
) -> _Finder:
    """Return a finder of `diagnosis`. at: changes of the location of the stage."""

    def find(s: Signature) -> DiagnosedFault | None:
        place = s.here.model_copy(update=at)
        return DiagnosedFault(diagnosis, place, words(s) if words else None) if applies(s) else None

    return find


_else = bool  # applies to every signature
_EVERYWHERE: dict[str, str | None] = {"module": None, "parameter": None}
_BACKWARD: dict[str, str | None] = {"phase": "backward"}
_ALL: tuple[Phase, ...] = ("inputs", "forward", "backward", "reduce", "clip", "optimizer")

# The phases in which an error is made, and its diagnosis: the first rule that finds one decides.
_RULES: tuple[tuple[tuple[Phase, ...], _Finder], ...] = (
    (_ALL, _if(lambda s: s.origin.reported.statistic == "non-finite", "non-finite")),
    (_ALL, lambda s: find_wrong_labels(s.evidence.report.replay.labels)),
    (("inputs",), _if(_else, "inputs-differ")),
    (_ALL, _find_untied),
    (_ALL, _find_other_weights),
    (_ALL, lambda s: find_unexpectedly_trained(s.evidence)),
    (_ALL, _find_frozen),
    (("backward", "clip"), lambda s: find_kept_gradients(s.evidence, s.here)),
    (("backward",), _find_shares),
    (("forward",), lambda s: _find_shares(s) if s.is_of_loss() else None),
    (("clip",), lambda s: _find_shares(s) if s.is_hidden_backward_wrong() else None),
    (("backward",), _if(Signature.is_without_gradients, "frozen-parameters", at=_EVERYWHERE)),
    # A wrong factor of the loss matters only for the gradients.
    (("forward", "backward"), _if(Signature.is_loss_scaled, "loss-scale", Signature.factor_of_loss, _BACKWARD)),
    (("backward",), _if(lambda s: s.are_sums_wrong() and is_clipped_in_backward(s.evidence.reports), "clip-norm", at=_EVERYWHERE)),
    (("backward", "clip"), _find_without_gradient),
    (("backward", "clip"), _find_gap),
    (("backward",), _if(lambda s: s.are_sums_wrong() and s.are_scaled_alike(), "loss-scale", Signature.factor, _EVERYWHERE)),
    (("backward",), _find_wrong_sums),
    (("backward",), _if(Signature.is_of_loss, "module-error")),
    (("backward",), _if(lambda s: s.evidence.report.gradients.drew_in_backward, "rng-state")),
    (("backward",), _if(Signature.are_norms_wrong, "missing-reduction")),
    (("forward", "backward"), _if(Signature.is_only_part, "missing-reduction")),
    (("forward", "backward"), _if(_else, "module-error")),
    (("reduce",), _if(Signature.are_zero, "frozen-parameters", at=_EVERYWHERE)),
    (("reduce",), _if(lambda s: s.are_scaled_alike() and is_clipped_in_reduce(s.evidence.reports), "clip-norm", at=_EVERYWHERE)),
    (("reduce",), _if(lambda s: s.are_scaled_alike() or is_divided_by_another_factor(s.evidence), "loss-scale", Signature.factor, _EVERYWHERE)),
    (("reduce",), lambda s: find_wrong_rank_shares(s.evidence)),
    (("reduce",), _if(Signature.is_rounding, "module-error")),
    (("reduce",), _if(_else, "missing-reduction")),
    (("clip",), _if(lambda s: s.is_hidden_backward_wrong() and not s.do_most_fail(), "module-error", at=_BACKWARD)),
    (("clip",), _if(lambda s: s.is_hidden_backward_wrong() and s.are_zero(), "frozen-parameters", at=_BACKWARD | _EVERYWHERE)),
    (("clip",), _if(Signature.is_hidden_backward_wrong, "missing-reduction", at=_BACKWARD | _EVERYWHERE)),
    (("clip",), _if(lambda s: not s.hides_backward and is_norm_off_by_one_factor(s.evidence), "loss-scale", at=_EVERYWHERE)),
    (("clip",), _if(_else, "clip-norm", Signature.factor, _EVERYWHERE)),
    (("optimizer",), _if(lambda s: not s.here.parameter or s.do_most_fail(), "optimizer-update", Signature.form_of_updates, _EVERYWHERE)),
    (("optimizer",), _if(_else, "optimizer-update", Signature.form_of_updates)),
)  # fmt: skip
