"""What is wrong, by its signature: which stages fail together, and how."""

import math
from dataclasses import replace

from assay.comparing.judge import FailedStage, Judged
from assay.comparing.levels import Finding
from assay.comparing.results import PortResult
from assay.errors import name_alike
from assay.sites import Phase
from assay.training.judging.early_clipping import is_clipped_in_backward, is_clipped_in_reduce
from assay.training.judging.evidence import FreeEvidence, TrainEvidence
from assay.training.judging.free_run import RESUMED_TRAJECTORY
from assay.training.judging.groups import JudgedGroup
from assay.training.judging.labels import find_wrong_labels
from assay.training.judging.loss_scale import (
    is_divided_by_another_factor,
    is_taken_off_by_another_factor,
)
from assay.training.judging.places import (
    PARAMETER_PREFIX,
    is_bad_at_first_only,
    is_root_gradient,
    location_of,
    parameter_of,
)
from assay.training.judging.shares import find_wrong_rank_shares, find_wrong_shares
from assay.verdicts import Diagnosis, Location

# A gradient of the right direction and another length: what is left after scaling, relative to
# what the scale changes. One wrong element in a thousand would leave 3%.
_PARALLEL = 0.02

# Of many gradients, each is scaled by the same number to this accuracy; in 8 bits that rounds to
# 0.4%, a factor near 1 is known to a tenth of what it changes.
_ALIKE = 0.1

# What leaves out the part of even one of many ranks is far above what any dtype rounds.
_LEAST_PART = 0.05

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
) -> Finding:
    """What the replayed steps show; `origin` is the stage where the error is made."""
    failed = [item for group in groups.values() for item in group.failed]
    location = location_of(origin, failed, evidence.rows)
    if origin.reported.ratio.statistic == "non-finite":
        return Finding("non-finite", location)
    labels = find_wrong_labels(evidence.report.labels)
    if labels is not None:
        return labels
    phase = origin.stage.phase
    if phase == "inputs":
        return Finding("inputs-differ", location)
    return (
        _find_untied(evidence, location)
        or _find_other_weights(evidence, origin, location)
        or find_unexpectedly_trained(evidence)
        or _find_frozen(evidence, groups)
        or _diagnose_phase(evidence, groups, origin, location)
    )


def _find_untied(evidence: TrainEvidence, location: Location) -> Finding | None:
    lost = [names for names in evidence.reference.shared if names not in evidence.report.shared]
    if not lost:
        return None
    # The table that is shared is the embedding's; what has become a copy is the head's.
    name = lost[0][0]
    module = name.rpartition(".")[0]
    return Finding(
        "untied-parameters", location.model_copy(update={"module": module, "parameter": name})
    )


def _find_other_weights(
    evidence: TrainEvidence, origin: FailedStage, location: Location
) -> Finding | None:
    different = evidence.report.weights_different
    if location.phase == "optimizer" and location.parameter in different:
        # Only the first of the replayed steps starts from the candidate's own weights: where no input
        # reaches what differs, its update shows it, and no later one.
        at_first = is_bad_at_first_only(origin.reported, evidence.rows)
        return _weight_mismatch(location.parameter) if at_first else None
    own = [name for name in different if name.rpartition(".")[0] == location.module]
    if not own or location.phase not in ("forward", "backward"):
        return None
    return Finding("weight-mismatch", location.model_copy(update={"parameter": own[0]}))


def diagnose_free_run(evidence: FreeEvidence, failed: list[Judged]) -> Finding:
    """What a free run shows that ends elsewhere, while every stage of a step is right by itself.

    failed: its losses and trajectories that are over their limits; at least one.
    """
    if all(item.port.port.startswith(RESUMED_TRAJECTORY) for item in failed):
        location = Location(phase="checkpoint", step=evidence.options.resume_at)
        return Finding("checkpoint-mismatch", location)
    elsewhere = [parameter_of(item) for item in sorted(failed, key=lambda item: -item.severity)]
    different = evidence.report.weights_different
    if different:
        # Only the first of the replayed steps starts from them.
        named = [name for name in elsewhere if name in different]
        return _weight_mismatch((named or different)[0])
    return Finding("optimizer-update", Location(phase="optimizer"))


def _weight_mismatch(parameter: str) -> Finding:
    module = parameter.rpartition(".")[0]
    return Finding("weight-mismatch", Location(phase="forward", module=module, parameter=parameter))


def _find_frozen(evidence: TrainEvidence, groups: dict[str, JudgedGroup]) -> Finding | None:
    """Parameters that do not move at all, where the noise run's do."""
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


def _frozen(evidence: TrainEvidence, names: list[str], how: str) -> Finding:
    num_trained = evidence.reference.num_trainable
    reason = f"{len(names)} of {num_trained} trained parameters {how}: {name_alike(names)}"
    location = _optimizer_location(names[0] if len(names) == 1 else None)
    return Finding("frozen-parameters", location, reason)


def find_left_out(evidence: TrainEvidence, updates: JudgedGroup) -> Finding | None:
    """Find parameters that the reference trains and that the optimizer neither holds nor moves."""
    moved = {
        parameter_of(item)
        for item in updates.judged
        if item.port.port.startswith("update.") and _moves(item)
    }
    names = [name for name in evidence.report.not_in_optimizer if name not in moved]
    return _frozen(evidence, names, "are not in the optimizer") if names else None


def find_unexpectedly_trained(evidence: FreeEvidence) -> Finding | None:
    """Parameters that are trained and should not be, such as the base under an adapter."""
    unexpectedly_trained = evidence.report.unexpectedly_trained
    return (
        Finding("optimizer-update", _optimizer_location(unexpectedly_trained[0]))
        if unexpectedly_trained
        else None
    )


def _optimizer_location(parameter: str | None) -> Location:
    module = parameter.rpartition(".")[0] if parameter is not None else None
    return Location(phase="optimizer", module=module, parameter=parameter)


def _moves(item: Judged) -> bool:
    """Return True if any of the candidate's values is not zero."""
    sums = item.port.sums
    return sums.ee + 2 * sums.de + sums.dd > _SAME_SUM * (sums.ee + sums.dd)


def stands_still(item: Judged) -> bool:
    """Whether the candidate's values are all zero and the reference's are not."""
    sums = item.port.sums
    exact = (sums.dd - sums.ee, sums.de + sums.ee)
    # Sums of squares that were added up in another order.
    return item.failed and sums.ee > 0 and max(map(abs, exact)) <= _SAME_SUM * sums.ee


def _diagnose_phase(
    evidence: TrainEvidence, groups: dict[str, JudgedGroup], origin: FailedStage, location: Location
) -> Finding:
    port = origin.reported.port
    of_loss = port.port == "loss" or origin.stage.phase == "backward"
    if of_loss and (shares := find_wrong_shares(evidence)):
        at_loss = port.port == "loss" or is_root_gradient(port.module, port.port, "backward")
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
                return Finding("module-error", location)
            return _diagnose_group(evidence, group, phase, location)


def _diagnose_forward(
    evidence: TrainEvidence, groups: dict[str, JudgedGroup], port: PortResult, location: Location
) -> Finding:
    if port.port == "loss" and _is_loss_scaled(evidence):
        # What is wrong with a wrong length of the loss is what it does to the gradients.
        return Finding("loss-scale", location.model_copy(update={"phase": "backward"}))
    parts = evidence.on_ranks and _is_only_part(groups, port)
    return Finding("missing-reduction" if parts else "module-error", location)


def _diagnose_backward(
    evidence: TrainEvidence, groups: dict[str, JudgedGroup], port: PortResult, location: Location
) -> Finding:
    if lost := _find_lost_gradients(evidence, groups, location):
        return lost
    if not groups["gradients"].failed and groups["stage-backward"].failed:
        # Boundaries are right: what is wrong is how parameters' gradients are made, or added up.
        if _all_scaled_alike(groups["stage-backward"]):
            return Finding("loss-scale", _of_no_module(location))
        if wrong_sums := _wrong_sums(evidence, groups["stage-backward"]):
            return Finding("missing-reduction", _place_of_sums(evidence, wrong_sums, location))
    if is_root_gradient(port.module, port.port, "backward"):
        return Finding("loss-scale" if _is_loss_scaled(evidence) else "module-error", location)
    if evidence.report.drew_in_backward:
        return Finding("rng-state", location)
    parts = evidence.on_ranks and _is_only_part(groups, port)
    return Finding(
        "missing-reduction" if parts or _only_norms(groups) else "module-error", location
    )


def _diagnose_group(
    evidence: TrainEvidence, group: JudgedGroup, phase: Phase, location: Location
) -> Finding:
    if phase == "reduce":
        if _are_zero(group):
            return Finding("frozen-parameters", _of_no_module(location))
        if _all_scaled_alike(group) and is_clipped_in_reduce(evidence.reports):
            return Finding("clip-norm", _of_no_module(location))
        if _all_scaled_alike(group) or is_divided_by_another_factor(evidence):
            return Finding("loss-scale", _of_no_module(location))
        found = find_wrong_rank_shares(evidence)
        if found or not _is_part_missing(group):
            return found or Finding("module-error", location)
    if phase == "clip" and is_taken_off_by_another_factor(evidence):
        return Finding("loss-scale", _of_no_module(location))
    if phase == "clip" or (phase == "optimizer" and _most_fail(group)):
        location = _of_no_module(location)
    return Finding(_OF_GROUP[group.name], location)


def _find_lost_gradients(
    evidence: TrainEvidence, groups: dict[str, JudgedGroup], location: Location
) -> Finding | None:
    """Gradients of parameters that are none at all, or shortened while they are added up."""
    own = groups["stage-backward"]
    if _is_without_gradients(evidence, own):
        return Finding("frozen-parameters", _of_no_module(location))
    only_sums = bool(own.failed) and not groups["gradients"].failed
    if only_sums and is_clipped_in_backward(evidence.reports):
        return Finding("clip-norm", _of_no_module(location))
    return None


def _is_without_gradients(evidence: TrainEvidence, group: JudgedGroup) -> bool:
    """Whether no gradient reaches any parameter: it is lost at the loss, or at all parameters."""
    scales = evidence.report.logit_gradients
    lost = bool(scales) and all(abs(1 + one.slope) <= _SAME_SUM and not one.rest for one in scales)
    return lost or _are_zero(group)


def _are_zero(group: JudgedGroup) -> bool:
    """Whether the gradients of all parameters are zero, and the reference's are not."""
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


def _of_no_module(location: Location) -> Location:
    return location.model_copy(update={"module": None, "parameter": None})


def _is_loss_scaled(evidence: TrainEvidence) -> bool:
    """Whether in every micro-batch the gradient at the logits has another length and no more."""
    scales = evidence.report.logit_gradients
    noise = 4 * evidence.unit_roundoff
    return any(abs(scale.slope) > noise for scale in scales) and all(
        scale.rest <= max(_PARALLEL * abs(scale.slope), noise) for scale in scales
    )


def _all_scaled_alike(group: JudgedGroup) -> bool:
    """Whether every gradient is the reference's times the same number."""
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
    """Parameters with a wrong gradient that is not the sum of what backward gave them, worst first.

    What backward gave them is right or wrong by itself: then their module is to blame.
    """
    errors = evidence.report.errors_of_sums
    wrong = {parameter_of(item) for item in group.failed}
    lost = [name for name in wrong if not errors.get(name, 0.0) <= _LEAST_PART]
    return sorted(lost, key=lambda name: (-errors[name], name))


def _place_of_sums(evidence: TrainEvidence, wrong: list[str], location: Location) -> Location:
    """The parameter whose sum is wrong; none where that of every parameter is."""
    if len(wrong) == len(evidence.report.errors_of_sums):
        return _of_no_module(location)
    module = wrong[0].rpartition(".")[0]
    return location.model_copy(update={"module": module, "parameter": wrong[0]})


def _most_fail(group: JudgedGroup) -> bool:
    """Whether the values of more than half of all modules are wrong: then it is none of them."""
    modules = {port.stage.module for port in group.ports}
    return 2 * len({item.port.stage.module for item in group.failed}) > len(modules)


def _is_only_part(groups: dict[str, JudgedGroup], port: PortResult) -> bool:
    """Whether ranks hold different parts of what each should have whole.

    The parts add up to it: gradients of a trainer that reduces them inside of backward, results and
    gradients of layers that are divided over ranks.
    """
    parts = [
        1 + one.sums.slope
        for group in groups.values()
        for one in group.ports
        if (one.module, one.port, one.stage) == (port.module, port.port, port.stage)
    ]
    return abs(sum(parts) - 1) <= _ALIKE and max(parts) - min(parts) > _ALIKE


def _is_part_missing(group: JudgedGroup) -> bool:
    """Whether some sum is wrong by more than its rounding."""
    failed = [item.port.sums for item in group.failed]
    return any(not one.relative_error <= _LEAST_PART for one in failed)


def _only_norms(groups: dict[str, JudgedGroup]) -> bool:
    """Whether nothing but gradients of norms' parameters is wrong.

    Under sequence parallelism each rank has the gradients of its own tokens: a sum over ranks
    that is left out shows in the parameters that are not sharded, and nowhere else.
    """
    failed = [item for group in groups.values() for item in group.failed]
    return all(
        item.port.stage.phase == "backward"
        and item.port.port.startswith(PARAMETER_PREFIX)
        and "Norm" in item.port.kind
        for item in failed
    )
