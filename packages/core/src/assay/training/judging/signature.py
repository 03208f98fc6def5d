"""Signature of an error in a training step: the stages that fail together, and the form of their errors."""

import math
from dataclasses import dataclass
from statistics import median

from assay.comparing.judge import FailedStage, Judged
from assay.comparing.results import PortResult
from assay.noise import error_beyond
from assay.sites import Phase
from assay.training.judging import gradient_factors as factors
from assay.training.judging.evidence import TrainEvidence
from assay.training.judging.groups import JudgedGroup
from assay.training.judging.places import (
    PARAMETER_PREFIX,
    UPDATE_PREFIX,
    is_made_by_loss,
    parameter_name,
    parameter_of,
)
from assay.verdicts import Location

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
        scales = self.evidence.report.loss.logit_gradients
        noise = 4 * self.evidence.unit_roundoff
        is_scaled = any(abs(scale.slope) > noise for scale in scales) and all(
            scale.rest <= max(_PARALLEL * abs(scale.slope), noise) for scale in scales
        )
        return self.is_of_loss() and is_scaled

    def factor_of_loss(self) -> str | None:
        """Name the factor of the loss gradients of all micro-batches, if it is one."""
        lengths = [one.length for one in self.evidence.report.loss.logit_gradients]
        is_common = max(lengths) - min(lengths) <= _PARALLEL * abs(lengths[0])
        factor = factors.describe_factor(median(lengths))
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
        factor = factors.describe_factor(1 + median(port.sums.slope for port in self.gradients))
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
        scales = self.evidence.report.loss.logit_gradients
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
        return self.hides_backward and not self.are_scaled_alike()

    def do_most_fail(self) -> bool:
        """Return True if more than half of all modules fail, so that no single module is at fault."""
        modules = {port.stage.module for port in self.group.ports}
        return 2 * len({item.port.stage.module for item in self.group.failed}) > len(modules)

    def form_of_updates(self) -> str | None:
        """Name the factor that most updates have in common, and state that clipping is not visible.

        Most, not all: in 16 bits small updates round to few values.
        """
        slopes = [
            1 + port.sums.slope
            for port in self.group.ports
            if port.port.startswith(UPDATE_PREFIX) and port.sums.ee > 0
        ]
        factor = median(slopes) if slopes else 1.0
        is_common = 2 * sum(abs(one - factor) <= _ALIKE for one in slopes) > len(slopes)
        words = []
        if is_common and abs(factor - 1) > LEAST_PART:
            words.append(f"most updates are {factors.describe_factor(factor)} the reference's")
        if "clip" in self.evidence.report.traits.invisible_phases:
            words.append("clip is not visible: the error is made there, or here")
        return "; ".join(words) or None


def stands_still(item: Judged) -> bool:
    """Return True if the candidate's values are all zero and the reference's are not."""
    sums = item.port.sums
    exact = (sums.dd - sums.ee, sums.de + sums.ee)
    return item.failed and sums.ee > 0 and max(map(abs, exact)) <= SAME_SUM * sums.ee
