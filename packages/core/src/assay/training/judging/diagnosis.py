"""Diagnoses an error by its signature: the stages that fail together, and the form of their errors."""

import math
from dataclasses import replace

from assay.comparing.judge import FailedStage, Judged
from assay.comparing.levels import DiagnosedFault
from assay.comparing.results import PortResult
from assay.errors import name_alike
from assay.sites import Phase
from assay.training.judging.evidence import FreeEvidence, TrainEvidence
from assay.training.judging.free_run import RESUMED_TRAJECTORY
from assay.training.judging.gradient_factors import (
    find_wrong_rank_shares,
    find_wrong_shares,
    is_clipped_in_backward,
    is_clipped_in_reduce,
    is_divided_by_another_factor,
    is_norm_off_by_one_factor,
)
from assay.training.judging.groups import JudgedGroup
from assay.training.judging.labels import find_wrong_labels
from assay.training.judging.places import (
    PARAMETER_PREFIX,
    is_bad_at_first_only,
    is_made_by_loss,
    location_of,
    location_of_parameter,
    parameter_of,
)
from assay.verdicts import Diagnosis, Location

# Largest residual of a gradient that differs only in length, relative to the change of length. One
# wrong element in a thousand would leave 3%.
_PARALLEL = 0.02

# Accuracy to which many gradients share one factor. Eight bits round to 0.4%, which leaves a factor
# near 1 known to a tenth of its difference from 1.
_ALIKE = 0.1

# Losing the part of even one of many ranks is an error far above the rounding of any dtype.
_LEAST_PART = 0.05

# Rounding of sums of squares that were added up in another order.
_SAME_SUM = 1e-9

_OF_GROUP: dict[str, Diagnosis] = {
    "stage-reduce": "missing-reduction",
    "stage-clip": "clip-norm",
    "stage-optimizer": "optimizer-update",
}
_GROUP_OF_PHASE: dict[Phase, str] = {
    "reduce": "stage-reduce",
    "clip": "stage-clip",
    "optimizer": "stage-optimizer",
}


def diagnose_replay(
    evidence: TrainEvidence, groups: dict[str, JudgedGroup], origin: FailedStage
) -> DiagnosedFault:
    """Diagnose the replayed steps; `origin` is the stage that makes the error."""
    failed = [item for group in groups.values() for item in group.failed]
    location = location_of(origin, failed, evidence.rows)
    if origin.reported.ratio.statistic == "non-finite":
        return DiagnosedFault("non-finite", location)
    labels = find_wrong_labels(evidence.report.loss.labels)
    if labels is not None:
        return labels
    if origin.stage.phase == "inputs":
        return DiagnosedFault("inputs-differ", location)
    return (
        _find_untied(evidence, location)
        or _find_other_weights(evidence, origin, location)
        or find_unexpectedly_trained(evidence)
        or _find_frozen(evidence, groups)
        or _diagnose_phase(evidence, groups, origin, location)
    )


def _find_untied(evidence: TrainEvidence, location: Location) -> DiagnosedFault | None:
    shared = evidence.report.model.shared
    lost = [names for names in evidence.reference.shared if names not in shared]
    # The shared table belongs to the embedding; the copy belongs to the head.
    return (
        DiagnosedFault("untied-parameters", _at_parameter(location, lost[0][0])) if lost else None
    )


def _find_other_weights(
    evidence: TrainEvidence, origin: FailedStage, location: Location
) -> DiagnosedFault | None:
    different = evidence.report.model.weights_different
    if location.phase == "optimizer" and location.parameter in different:
        # Only the first replayed step starts from the candidate's own weights. If no input reaches a
        # different weight, only the update of that step shows it.
        at_first = is_bad_at_first_only(origin.reported, evidence.rows)
        return _weight_mismatch(location.parameter) if at_first else None
    own = [name for name in different if name.rpartition(".")[0] == location.module]
    if not own or location.phase not in ("forward", "backward"):
        return None
    return DiagnosedFault("weight-mismatch", location.model_copy(update={"parameter": own[0]}))


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


def _find_frozen(evidence: TrainEvidence, groups: dict[str, JudgedGroup]) -> DiagnosedFault | None:
    """Find parameters that do not move, although the noise run moves them."""
    group = groups["stage-optimizer"]
    if left_out := find_left_out(evidence, group):
        return left_out
    frozen = sorted(
        {
            parameter_of(item)
            for item in group.judged
            if item.port.port.startswith("update.") and stands_still(item)
        }
    )
    return _frozen(evidence, frozen, "do not move") if frozen else None


def _frozen(evidence: TrainEvidence, names: list[str], how: str) -> DiagnosedFault:
    num_trained = evidence.reference.num_trainable
    reason = f"{len(names)} of {num_trained} trained parameters {how}: {name_alike(names)}"
    location = location_of_parameter("optimizer", names[0] if len(names) == 1 else None)
    return DiagnosedFault("frozen-parameters", location, reason)


def find_left_out(evidence: TrainEvidence, updates: JudgedGroup) -> DiagnosedFault | None:
    """Find parameters that the reference trains and that the optimizer neither holds nor moves."""
    moved = {
        parameter_of(item)
        for item in updates.judged
        if item.port.port.startswith("update.") and _moves(item)
    }
    names = [name for name in evidence.report.optimizer.not_in_optimizer if name not in moved]
    return _frozen(evidence, names, "are not in the optimizer") if names else None


def find_unexpectedly_trained(evidence: FreeEvidence) -> DiagnosedFault | None:
    """Find parameters that should not be trained, such as the base weights under an adapter."""
    names = evidence.report.optimizer.unexpectedly_trained
    location = location_of_parameter("optimizer", names[0] if names else None)
    return DiagnosedFault("optimizer-update", location) if names else None


def _moves(item: Judged) -> bool:
    sums = item.port.sums
    return sums.ee + 2 * sums.de + sums.dd > _SAME_SUM * (sums.ee + sums.dd)


def stands_still(item: Judged) -> bool:
    """Return True if the candidate's values are all zero and the reference's are not."""
    sums = item.port.sums
    exact = (sums.dd - sums.ee, sums.de + sums.ee)
    return item.failed and sums.ee > 0 and max(map(abs, exact)) <= _SAME_SUM * sums.ee


def _diagnose_phase(
    evidence: TrainEvidence, groups: dict[str, JudgedGroup], origin: FailedStage, location: Location
) -> DiagnosedFault:
    port = origin.reported.port
    of_loss = port.port == "loss" or origin.stage.phase == "backward"
    if of_loss and (shares := find_wrong_shares(evidence)):
        at_loss = port.port == "loss" or is_made_by_loss(port.module, port.port)
        if shares.diagnosis == "loss-scale" and at_loss:
            return replace(shares, location=location.model_copy(update={"phase": "backward"}))
        return shares
    match origin.stage.phase:
        case "forward":
            return _diagnose_forward(evidence, groups, port, location)
        case "backward":
            return _diagnose_backward(evidence, groups, port, location)
        case phase:
            group = groups.get(_GROUP_OF_PHASE.get(phase, ""))
            if group is None:
                return DiagnosedFault("module-error", location)
            return _diagnose_group(evidence, group, phase, location)


def _diagnose_forward(
    evidence: TrainEvidence, groups: dict[str, JudgedGroup], port: PortResult, location: Location
) -> DiagnosedFault:
    if port.port == "loss" and _is_loss_scaled(evidence):
        # A wrong factor of the loss matters only for the gradients.
        return DiagnosedFault("loss-scale", location.model_copy(update={"phase": "backward"}))
    parts = evidence.on_ranks and _is_only_part(groups, port)
    return DiagnosedFault("missing-reduction" if parts else "module-error", location)


def _diagnose_backward(
    evidence: TrainEvidence, groups: dict[str, JudgedGroup], port: PortResult, location: Location
) -> DiagnosedFault:
    if lost := _find_lost_gradients(evidence, groups, location):
        return lost
    if not groups["gradients"].failed and groups["stage-backward"].failed:
        # Gradients at module boundaries are correct. Those of parameters are computed or summed wrong.
        if _all_scaled_alike(groups["stage-backward"]):
            return DiagnosedFault("loss-scale", _without_module(location))
        if wrong_sums := _wrong_sums(evidence, groups["stage-backward"]):
            return DiagnosedFault(
                "missing-reduction", _place_of_sums(evidence, wrong_sums, location)
            )
    if is_made_by_loss(port.module, port.port):
        return DiagnosedFault(
            "loss-scale" if _is_loss_scaled(evidence) else "module-error", location
        )
    if evidence.report.gradients.drew_in_backward:
        return DiagnosedFault("rng-state", location)
    parts = evidence.on_ranks and _is_only_part(groups, port)
    return DiagnosedFault(
        "missing-reduction" if parts or _only_norms(groups) else "module-error", location
    )


def _diagnose_group(
    evidence: TrainEvidence, group: JudgedGroup, phase: Phase, location: Location
) -> DiagnosedFault:
    if phase == "reduce":
        return _diagnose_reduction(evidence, group, location)
    if phase == "clip" and "backward" in evidence.report.traits.invisible:
        if not _all_scaled_alike(group):
            return _diagnose_unseen_backward(group, location)
    elif phase == "clip" and is_norm_off_by_one_factor(evidence):
        return DiagnosedFault("loss-scale", _without_module(location))
    is_common = location.parameter is None or _most_fail(group)
    if phase == "clip" or (phase == "optimizer" and is_common):
        location = _without_module(location)
    return DiagnosedFault(_OF_GROUP[group.name], location)


def _diagnose_reduction(
    evidence: TrainEvidence, group: JudgedGroup, location: Location
) -> DiagnosedFault:
    everywhere = _without_module(location)
    if _are_zero(group):
        return DiagnosedFault("frozen-parameters", everywhere)
    if _all_scaled_alike(group) and is_clipped_in_reduce(evidence.reports):
        return DiagnosedFault("clip-norm", everywhere)
    if _all_scaled_alike(group) or is_divided_by_another_factor(evidence):
        return DiagnosedFault("loss-scale", everywhere)
    # A larger error is not rounding: some sum lacks a part.
    is_rounding = all(item.port.sums.relative_error <= _LEAST_PART for item in group.failed)
    diagnosis: Diagnosis = "module-error" if is_rounding else "missing-reduction"
    return find_wrong_rank_shares(evidence) or DiagnosedFault(diagnosis, location)


def _diagnose_unseen_backward(group: JudgedGroup, location: Location) -> DiagnosedFault:
    """Diagnose gradients after clipping that no common factor explains, if backward is not visible."""
    location = location.model_copy(update={"phase": "backward"})
    if not _most_fail(group):
        return DiagnosedFault("module-error", location)
    diagnosis: Diagnosis = "frozen-parameters" if _are_zero(group) else "missing-reduction"
    return DiagnosedFault(diagnosis, _without_module(location))


def _find_lost_gradients(
    evidence: TrainEvidence, groups: dict[str, JudgedGroup], location: Location
) -> DiagnosedFault | None:
    """Find parameter gradients that are all zero, or clipped while they are accumulated."""
    own = groups["stage-backward"]
    if _is_without_gradients(evidence, own):
        return DiagnosedFault("frozen-parameters", _without_module(location))
    only_sums = bool(own.failed) and not groups["gradients"].failed
    if only_sums and is_clipped_in_backward(evidence.reports):
        return DiagnosedFault("clip-norm", _without_module(location))
    return None


def _is_without_gradients(evidence: TrainEvidence, group: JudgedGroup) -> bool:
    """Return True if gradients are zero at the logits, or at all parameters."""
    scales = evidence.report.loss.logit_gradients
    lost = bool(scales) and all(abs(1 + one.slope) <= _SAME_SUM and not one.rest for one in scales)
    return lost or _are_zero(group)


def _are_zero(group: JudgedGroup) -> bool:
    """Return True if the gradients of all parameters are zero, and the reference's are not."""
    expected = {
        (port.rank, port.module, port.port)
        for port in group.ports
        if port.port.startswith(PARAMETER_PREFIX) and port.sums.ee > 0
    }
    zero = {
        (item.port.rank, item.port.module, item.port.port)
        for item in group.failed
        if item.port.port.startswith(PARAMETER_PREFIX) and stands_still(item)
    }
    return bool(expected) and zero == expected


def _without_module(location: Location) -> Location:
    return location.model_copy(update={"module": None, "parameter": None})


def _at_parameter(location: Location, name: str) -> Location:
    return location.model_copy(update={"module": name.rpartition(".")[0], "parameter": name})


def _is_loss_scaled(evidence: TrainEvidence) -> bool:
    """Return True if gradients at the logits differ only in length, in every micro-batch."""
    scales = evidence.report.loss.logit_gradients
    noise = 4 * evidence.unit_roundoff
    return any(abs(scale.slope) > noise for scale in scales) and all(
        scale.rest <= max(_PARALLEL * abs(scale.slope), noise) for scale in scales
    )


def _all_scaled_alike(group: JudgedGroup) -> bool:
    """Return True if every gradient is the reference's times one common factor."""
    sums = [
        port.sums
        for port in group.ports
        if port.port.startswith(PARAMETER_PREFIX) and port.sums.ee > 0
    ]
    slopes = [one.slope for one in sums]
    if not slopes or min(abs(slope) for slope in slopes) == 0:
        return False
    rests = [
        math.sqrt(max(one.dd - one.de * one.de / one.ee, 0.0) / one.ee) / abs(one.slope)
        for one in sums
    ]
    spread = max(slopes) - min(slopes)
    return max(rests) <= _ALIKE and spread <= _ALIKE * abs(slopes[0])


def _wrong_sums(evidence: TrainEvidence, group: JudgedGroup) -> list[str]:
    """List parameters with a wrong gradient that is not the sum of its parts, worst first.

    If the sum is right, its parts are wrong, and the module that computes them is at fault.
    """
    errors = evidence.report.gradients.errors_of_sums
    wrong = {parameter_of(item) for item in group.failed}
    lost = [name for name in wrong if not errors.get(name, 0.0) <= _LEAST_PART]
    return sorted(lost, key=lambda name: (-errors[name], name))


def _place_of_sums(evidence: TrainEvidence, wrong: list[str], location: Location) -> Location:
    """Name the parameter with the worst sum, or no parameter if all sums are wrong."""
    if len(wrong) == len(evidence.report.gradients.errors_of_sums):
        return _without_module(location)
    return _at_parameter(location, wrong[0])


def _most_fail(group: JudgedGroup) -> bool:
    """Return True if more than half of all modules fail, so that no single module is at fault."""
    modules = {port.stage.module for port in group.ports}
    return 2 * len({item.port.stage.module for item in group.failed}) > len(modules)


def _is_only_part(groups: dict[str, JudgedGroup], port: PortResult) -> bool:
    """Return True if the ranks hold different parts of a value that each should hold whole.

    The parts add up to the value. They are gradients that backward should reduce, or results and
    gradients of layers that are divided over ranks.
    """
    parts = [
        1 + one.sums.slope
        for group in groups.values()
        for one in group.ports
        if (one.module, one.port, one.stage) == (port.module, port.port, port.stage)
    ]
    return abs(sum(parts) - 1) <= _ALIKE and max(parts) - min(parts) > _ALIKE


def _only_norms(groups: dict[str, JudgedGroup]) -> bool:
    """Return True if only gradients of norm parameters are wrong.

    Under sequence parallelism each rank has the gradients of its own tokens. A missing sum over ranks
    shows only in parameters that are not sharded.
    """
    failed = [item for group in groups.values() for item in group.failed]
    return all(
        item.port.stage.phase == "backward"
        and item.port.port.startswith(PARAMETER_PREFIX)
        and "Norm" in item.port.kind
        for item in failed
    )
