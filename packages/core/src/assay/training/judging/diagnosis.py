"""Diagnoses an error in a training step by the stages that fail together, and the form of their errors."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from assay.errors import name_alike, name_some
from assay.judge.levels import DiagnosedFault
from assay.judge.replays import FailedStage, Judged
from assay.judge.results import PortResult
from assay.metrics import RowErrors
from assay.noise import error_beyond
from assay.replay.gradients import ScaledStep, was_read_scaled
from assay.sites import Phase
from assay.training.judging.evidence import (
    PARAMETER_PREFIX,
    UPDATE_PREFIX,
    FreeEvidence,
    TrainEvidence,
    bad_steps,
    describe_steps,
    first_bad_step,
    is_made_by_loss,
    location_of,
    location_of_parameter,
    norms_by_step,
    parameter_name,
    parameter_of,
)
from assay.training.judging.free_run import RESUMED_TRAJECTORY
from assay.training.judging.gradient_parts import (
    find_kept_gradients,
    find_wrong_rank_shares,
    find_wrong_shares,
)
from assay.training.judging.judged_groups import JudgedGroup, noise_of_optimizer
from assay.training.judging.labels import find_wrong_labels
from assay.training.protocol import PHASE_METHODS, TrainingPlan
from assay.training.replay.step_values import NORM
from assay.training.reports import TrainerReport
from assay.verdicts import Diagnosis, Location

# Clipped gradients have the limit as norm, up to the rounding of each element: in total less than one
# unit of bfloat16, 2**-8, the coarsest dtype that is trained in. A hundredth is beyond that.
_LIMIT_TOLERANCE = 0.01

# The shares of ranks are not quite orthogonal, and not quite of equal length.
_SHARE_TOLERANCE = 0.1

# Every plan clips to this norm.
_LIMIT = TrainingPlan("", "").max_grad_norm


def describe_early_clipping(reports: Sequence[TrainerReport]) -> str | None:
    """Say when gradients have the clipping norm before they are reduced, on every rank in every step."""
    norms = [one for report in reports for one in report.gradients.norms if one.phase == "backward"]
    when = "the first micro-batch" if _all_at_limit([norm.first for norm in norms]) else "backward"
    is_clipped = when != "backward" or _all_at_limit([norm.found for norm in norms])
    words = (
        f"after {when} the gradients have the clipping norm, {_LIMIT:g}: they are clipped too early"
    )
    return words if is_clipped else None


def is_clipped_in_reduce(reports: Sequence[TrainerReport]) -> bool:
    """Return True if sums over ranks are as small as if each rank had clipped its share."""
    predicted: list[bool] = []
    for reduced in (norm for norm in reports[0].gradients.norms if norm.phase == "reduce"):
        shares = [
            share.injected
            for report in reports
            for share in report.gradients.norms
            if (share.step, share.phase) == (reduced.step, "backward")
        ]
        if not shares or min(shares) <= _LIMIT:
            return False
        expected = reduced.injected * _LIMIT * sum(1 / share for share in shares) / len(shares)
        predicted.append(abs(reduced.found - expected) <= _SHARE_TOLERANCE * expected)
    return bool(predicted) and all(predicted)


def _all_at_limit(norms: Sequence[float]) -> bool:
    return bool(norms) and all(abs(norm - _LIMIT) <= _LIMIT_TOLERANCE * _LIMIT for norm in norms)


# "clip-norm" and "loss-scale" both show as a norm that is off by one factor in all steps.
_SAME_FACTOR = 0.02


def is_scale_removed(evidence: TrainEvidence, groups: Mapping[str, JudgedGroup]) -> bool:
    """Return True if some phase removes the loss scale, correctly or not.

    A scale that nothing removes is an error of the loss, and is judged without dividing it out.
    Clipping alone hides such a scale: it gives gradients of any length the same norm.

    Both arguments belong to the replay with the scale divided out.
    """
    steps = evidence.report.replay.scaled_steps
    late = bool(groups["stage-optimizer"].failed) or any(
        item.port.port != "norm" for item in groups["stage-clip"].failed
    )
    if any(map(was_read_scaled, steps)):
        return late
    if any(step.taken_off is None and step.factor != 1 for step in steps):
        is_visible = "clip" not in evidence.report.traits.invisible_phases
        known = [step.norm is not None and step.norm == step.norm for step in steps]
        return (is_visible or all(known)) and not late
    return True


def is_divided_by_another_factor(evidence: TrainEvidence) -> bool:
    """Return True if, in some step, most gradients are the reference's times one wrong factor."""
    lengths = [s.left for s in evidence.report.replay.scaled_steps if s.left is not None]
    return any(abs(length - 1) > _SAME_FACTOR for length in lengths)


def is_norm_off_by_one_factor(evidence: TrainEvidence) -> bool:
    """Return True if all norms before clipping are the reference's times one wrong factor.

    The factor is not the loss scale itself.
    """
    steps = [step for step in evidence.report.replay.scaled_steps if step.factor != 1]
    norms = [step.norm for step in steps if step.norm is not None]
    if not norms or len(norms) < len(steps) or any(map(was_read_scaled, steps)):
        return False
    return (
        min(norms) > 0
        and max(norms) - min(norms) <= _SAME_FACTOR * min(norms)
        and abs(norms[0] - 1) > _SAME_FACTOR
    )


def notes_on_scale(steps: Sequence[ScaledStep]) -> list[str]:
    """Note the loss scale, and the phase that removes it."""
    notes = []
    for step in steps:
        if step.factor != 1:
            where = f"in {step.taken_off}" if step.taken_off else "in the optimizer's phase"
            mean = f"; the number of ranks in it in {step.averaged}" if step.averaged else ""
            notes.append(f"the loss is scaled by {step.factor:g}, taken off {where}{mean}")
        elif step.of_loss != 1:
            notes.append(
                f"compute_loss returns {step.of_loss:g} times the loss: backward takes it off"
            )
    return list(dict.fromkeys(notes))


def describe_factor(factor: float) -> str:
    """Put a factor before the value that it multiplies: "1/4 of" or "0.3 times"."""
    parts = round(1 / factor) if factor > 0 else 0
    is_share = parts > 1 and abs(factor * parts - 1) <= _SAME_FACTOR
    return f"1/{parts} of" if is_share else f"{factor:.3g} times"


def _describe_factors(factors: list[float]) -> str:
    """Describe what multiplies the reference's updates in each step, or in all.

    >>> _describe_factors([0.25])
    "1/4 of the reference's"
    >>> _describe_factors([2.0, 1.0])
    "the reference's times 2 in step 0, 1 in step 1"
    """
    if len(factors) == 1:
        return f"{describe_factor(factors[0])} the reference's"
    steps = [f"{factor:.3g} in step {step}" for step, factor in enumerate(factors)]
    return f"the reference's times {name_some(steps)}"


# Largest residual of a gradient that differs only in length, relative to the change of length. One
# wrong element in a thousand would leave 3%.
_PARALLEL = 0.02

# Accuracy to which many gradients share one factor. Eight bits round to 0.4%, which leaves a factor
# near 1 known to a tenth of its difference from 1.
_ALIKE = 0.1

# Losing the part of even one of many ranks is an error far above the rounding of any dtype.
LEAST_PART = 0.05

# Rounding of sums of squares that were added up in another order.
SAME_SUM = 1e-9


@dataclass(frozen=True, slots=True)
class Signature:
    """The stage that makes an error, and the signature of the error."""

    evidence: TrainEvidence
    groups: dict[str, JudgedGroup]
    origin: FailedStage
    here: Location

    @property
    def phase(self) -> Phase:
        """Phase that makes the error."""
        return self.origin.stage.phase

    @property
    def group(self) -> JudgedGroup:
        """The values of parameters after the phase."""
        return self.groups[f"stage-{self.phase}"]

    @property
    def gradients(self) -> list[PortResult]:
        """Gradients after the phase that are not zero in the reference."""
        ports = (port for port in self.group.ports if port.port.startswith(PARAMETER_PREFIX))
        return [port for port in ports if port.sums.ee > 0]

    @property
    def wrong_gradients(self) -> dict[str, float]:
        """Relative error by parameter, the worst first."""
        found = {
            parameter_of(item): item.port.sums.relative_error
            for item in self.group.failed
            if item.port.port.startswith(PARAMETER_PREFIX)
        }
        return dict(sorted(found.items(), key=lambda one: -one[1]))

    @property
    def hides_backward(self) -> bool:
        """Return True if the end of backward is not visible."""
        return "backward" in self.evidence.report.traits.invisible_phases

    @property
    def everywhere(self) -> Location:
        """Return the phase without a module."""
        return self.here.model_copy(update={"module": None, "parameter": None})

    def at(self, parameter: str) -> Location:
        """Return the place of a parameter in the phase."""
        module = parameter.rpartition(".")[0]
        return self.here.model_copy(update={"module": module, "parameter": parameter})

    def is_of_loss(self) -> bool:
        """Return True if the loss or its gradient is wrong."""
        port = self.origin.reported.port
        is_gradient = self.phase == "backward" and is_made_by_loss(port.module, port.port)
        return port.port == "loss" or is_gradient

    def is_loss_scaled(self) -> bool:
        """Return True if gradients at the logits differ only in length, in every micro-batch."""
        scales = self.evidence.report.replay.logit_gradients
        noise = 4 * self.evidence.unit_roundoff
        is_scaled = any(abs(scale.slope) > noise for scale in scales) and all(
            scale.rest <= max(_PARALLEL * abs(scale.slope), noise) for scale in scales
        )
        return self.is_of_loss() and is_scaled

    def factor_of_loss(self) -> str | None:
        """Name the factor of the loss gradients of all micro-batches, if it is one."""
        lengths = [one.length for one in self.evidence.report.replay.logit_gradients]
        is_common = max(lengths) - min(lengths) <= _PARALLEL * abs(lengths[0])
        factor = describe_factor(median(lengths))
        return f"the gradients of the loss are {factor} the reference's" if is_common else None

    def are_sums_wrong(self) -> bool:
        """Return True if gradients at module boundaries are correct."""
        return bool(self.group.failed) and not self.groups["gradients"].failed

    def are_scaled_alike(self) -> bool:
        """Return True if every gradient is the reference's times one common factor."""
        sums = [port.sums for port in self.gradients]
        slopes = [one.slope for one in sums]
        if not slopes or min(abs(slope) for slope in slopes) == 0:
            return False
        rests = [
            math.sqrt(max(one.dd - one.de * one.de / one.ee, 0.0) / one.ee) / abs(one.slope)
            for one in sums
        ]
        spread = max(slopes) - min(slopes)
        return max(rests) <= _ALIKE and spread <= _ALIKE * abs(slopes[0])

    def factor(self) -> str | None:
        """Name the factor that all gradients have in common, if they have one."""
        if not self.are_scaled_alike():
            return None
        factor = describe_factor(1 + median(port.sums.slope for port in self.gradients))
        return f"all gradients are {factor} the reference's"

    def list_unlike(self) -> list[str]:
        """List parameters whose gradients lack the factor that most have in common, worst first."""
        factor = 1 + median(port.sums.slope for port in self.gradients)
        errors = {
            parameter_name(p.stage.module, p.port): error_beyond(p.sums, factor)
            for p in self.gradients
        }
        return sorted((n for n in errors if errors[n] > _PARALLEL), key=lambda n: -errors[n])

    def is_without_gradients(self) -> bool:
        """Return True if gradients are zero at the logits, or at all parameters."""
        scales = self.evidence.report.replay.logit_gradients
        lost = bool(scales) and all(abs(one.length) <= SAME_SUM and not one.rest for one in scales)
        return lost or self.are_zero()

    def are_zero(self) -> bool:
        """Return True if the gradients of all parameters are zero."""
        zero = {id(item.port) for item in self.group.failed if stands_still(item)}
        return bool(self.gradients) and all(id(port) in zero for port in self.gradients)

    def is_only_part(self) -> bool:
        """Return True if the ranks hold different parts of a value that each should hold whole.

        The parts add up to the value. They are gradients that backward should reduce, or results and
        gradients of layers that are divided over ranks.
        """
        port = self.origin.reported.port
        parts = [
            1 + one.sums.slope
            for group in self.groups.values()
            for one in group.ports
            if (one.module, one.port, one.stage) == (port.module, port.port, port.stage)
        ]
        are_parts = abs(sum(parts) - 1) <= _ALIKE and max(parts) - min(parts) > _ALIKE
        return self.evidence.on_ranks and are_parts

    def are_norms_wrong(self) -> bool:
        """Return True if only gradients of norm parameters are wrong.

        Under sequence parallelism each rank has the gradients of its own tokens. A missing sum over
        ranks shows only in parameters that are not sharded.
        """
        return all(
            item.port.stage.phase == "backward"
            and item.port.port.startswith(PARAMETER_PREFIX)
            and "Norm" in item.port.kind
            for group in self.groups.values()
            for item in group.failed
        )

    def is_rounding(self) -> bool:
        """Return True if no sum lacks a part, which is a larger error."""
        return all(item.port.sums.relative_error <= LEAST_PART for item in self.group.failed)

    def is_hidden_backward_wrong(self) -> bool:
        """Return True if backward is not visible, and no clipping explains the gradients after it."""
        return self.hides_backward and not (self.are_scaled_alike() or self.is_norm_right())

    def is_norm_right(self) -> bool:
        """Return True if the norm before clipping is known, and the reference's."""
        norms = [item for item in self.groups["stage-clip"].judged if item.port.port == NORM]
        return bool(norms) and not any(item.failed for item in norms)

    def form_of_clipping(self) -> str | None:
        """Say what the norm before clipping shows, and name the factor of all clipped gradients."""
        factor = self.factor()
        if not self.is_norm_right():
            return factor
        wrong = "; the factor is wrong (clipped twice, not at all, or to another max_norm): "
        return f"the norm before clipping agrees with the reference's{wrong if factor else ''}{factor or ''}"

    def do_most_fail(self) -> bool:
        """Return True if more than half of all modules fail, so that no single module is at fault."""
        modules = {port.stage.module for port in self.group.ports}
        return 2 * len({item.port.stage.module for item in self.group.failed}) > len(modules)

    def form_of_updates(self) -> str | None:
        """Name the state that differs first, or else the factor of most updates, and hidden clipping."""
        state = self._first_state()
        words = [f"the optimizer's state {state} differs first, the updates follow"] * bool(state)
        factors = self._factors_of_updates()
        if any(abs(factor - 1) > LEAST_PART for factor in factors) and not state:
            words.append(f"most updates are {_describe_factors(factors)}")
        if "clip" in self.evidence.report.traits.invisible_phases:
            words.append("clip is not visible: the error is made there, or here")
        return "; ".join(words) or None

    def _factors_of_updates(self) -> list[float]:
        """Return the factor of most updates in each step, or one for all; empty if they have none in common.

        Norms state no sign, so the errors of all steps, without their rounding, get that of the slope. They must
        add up to it.
        """
        noise = noise_of_optimizer(self.evidence).ports
        found = []
        for port in self.group.ports:
            one, rounded = port.sums, noise.get((port.module, port.port))
            if one.ee <= 0 or not port.port.startswith(UPDATE_PREFIX):
                continue
            error, size = norms_by_step(RowErrors.concatenate(one.rows), self.evidence.rows)
            if rounded is not None:
                rounding, _ = norms_by_step(
                    RowErrors.concatenate(rounded.sums.rows), self.evidence.rows
                )
                without = (error**2 - rounding**2).clamp(min=0).sqrt()
                error = error.where(error == size, without)  # no update is not rounded
            changes = (error / size).where(error != 0, 0.0).copysign(torch.tensor(one.slope))
            is_sum = abs(float((changes * size**2).sum()) / one.ee - one.slope) <= _ALIKE
            found.append([1 + one.slope, *(1 + changes).tolist()] if is_sum else [])
        known = [factors for factors in found if factors]
        common = [median(factors) for factors in zip(*known, strict=True)]
        alike = [one for one in known if math.dist(one, common) <= _ALIKE]
        if 2 * len(alike) <= len(found):
            return []
        of_all, *of_steps = common
        return [of_all] if max(of_steps) - min(of_steps) <= _ALIKE else of_steps

    def _first_state(self) -> str:
        """Name the state of the optimizer that fails in an earlier step than any update; "" without one."""
        failed = self.group.failed
        steps = [(first_bad_step(one, self.evidence.rows), one.port.port) for one in failed]
        first = {port.partition(".")[0] for step, port in steps if step == min(steps)[0]}
        return "" if UPDATE_PREFIX.rstrip(".") in first else min(first, default="")


def stands_still(item: Judged) -> bool:
    """Return True if the candidate's values are all zero and the reference's are not."""
    sums = item.port.sums
    exact = (sums.dd - sums.ee, sums.de + sums.ee)
    return item.failed and sums.ee > 0 and max(map(abs, exact)) <= SAME_SUM * sums.ee


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


def _find_clipping_in_backward(case: Signature) -> DiagnosedFault | None:
    words = describe_early_clipping(case.evidence.reports) if case.are_sums_wrong() else None
    return DiagnosedFault("clip-norm", case.everywhere, words) if words else None


def _find_shares(case: Signature) -> DiagnosedFault | None:
    shares = find_wrong_shares(case.evidence)
    if shares is None or not case.is_of_loss():
        return shares
    is_made_by_loss = case.phase == "forward" or shares.diagnosis == "loss-scale"
    return replace(shares, location=case.here) if is_made_by_loss else shares


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


def find_early_clipping(evidence: TrainEvidence) -> DiagnosedFault | None:
    """Find clipping before the last micro-batch, whose gradients are then added to clipped ones."""
    steps = evidence.report.replay.clipped_early
    if not steps:
        return None
    reason = (
        "gradients are clipped in the middle of a step, and later micro-batches add to clipped ones"
        f" ({describe_steps(steps)})"
    )
    return DiagnosedFault("clip-norm", Location(phase="clip", step=steps[0]), reason)


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
    (("backward", "reduce", "clip", "optimizer"), lambda s: find_early_clipping(s.evidence)),
    (("backward", "clip"), lambda s: find_kept_gradients(s.evidence, s.here)),
    (("backward",), _find_clipping_in_backward),
    (("backward",), _find_shares),
    (("forward",), lambda s: _find_shares(s) if s.is_of_loss() else None),
    (("clip",), lambda s: _find_shares(s) if s.is_hidden_backward_wrong() else None),
    (("backward",), _if(Signature.is_without_gradients, "frozen-parameters", at=_EVERYWHERE)),
    (("forward", "backward"), _if(Signature.is_loss_scaled, "loss-scale", Signature.factor_of_loss)),
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
    (("clip",), _if(_else, "clip-norm", Signature.form_of_clipping, _EVERYWHERE)),
    (("optimizer",), _if(lambda s: not s.here.parameter or s.do_most_fail(), "optimizer-update", Signature.form_of_updates, _EVERYWHERE)),
    (("optimizer",), _if(_else, "optimizer-update", Signature.form_of_updates)),
)  # fmt: skip
