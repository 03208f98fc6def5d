"""Every step of a trainer, measured against a golden, whose values are injected."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from assay.comparing.results import ReplayResults
from assay.comparing.stored_results import attach_results
from assay.hooks.gradient_taps import GradientTaps
from assay.hooks.module_tracer import ModuleTracer
from assay.hooks.usage import UsageWatch
from assay.hooks.values.boundary import Boundary
from assay.locating.gradients import GradientReplayer
from assay.locating.label_gradients import LabelDifference
from assay.locating.loss_scale import GradientScale, LossScale, ScaledStep
from assay.locating.matching.packed_trace import PackedBatch, PackedTrace
from assay.locating.modules import Replayer
from assay.sites import Phase
from assay.trace import Trace, TraceWriter
from assay.training.batches import MicroBatch
from assay.training.protocol import StepReport
from assay.training.replay.observing.gradient_sums import GradientShare, GradientSums
from assay.training.replay.observing.observed_gradients import GradientNorm
from assay.training.replay.observing.step_observer import StepObserver
from assay.training.replay.observing.update_watch import MovedElements, UpdateWatch
from assay.training.replay.rank_view import RankView
from assay.training.replay.run_rows import RunRows
from assay.training.replay.stage_replayer import StageReplayer
from assay.training.replay.stage_values import PHASES
from assay.training.trainers.registry import OpenedTrainer

TRACE = "trace"


@dataclass(frozen=True, slots=True)
class ReplayedModel:
    """What a replay has to know of a model.

    attention: its attention implementation.
    pointwise: modules whose own code only rounds element by element.
    untrained: buffers and frozen parameters of the reference's; None for all.
    """

    attention: str
    pointwise: frozenset[str]
    untrained: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of a replay, kept together so that a skipped step can be discarded.

    modules, recomputed, gradients: at module boundaries; stages: between phases.
    scales, scaled_steps, labels: from gradients of the loss. shares: from micro-batches.
    micro_batches_run, norms: from the observer.
    errors_of_sums, moved: from gradients and updates. num_sharded, num_narrow: from GradientSums.
    """

    modules: ReplayResults
    recomputed: ReplayResults
    gradients: ReplayResults
    stages: dict[Phase, ReplayResults]
    scales: list[GradientScale]
    labels: list[LabelDifference]
    shares: list[GradientShare]
    micro_batches_run: list[tuple[int, int]]
    norms: list[GradientNorm]
    scaled_steps: list[ScaledStep]
    errors_of_sums: dict[str, float]
    num_sharded: int
    num_narrow: int
    moved: MovedElements


class ReplayedSteps:
    """A trainer that is measured against a golden, whose values are injected into every stage.

    Inside of `attached()`, `run_step` makes one step; `write` comes after the last one.

    sums: sums of the gradients. watch: usage of the model by the steps.
    """

    def __init__(
        self,
        opened: OpenedTrainer,
        golden: Path,
        rows: RunRows,
        boundary: Boundary,
        model: ReplayedModel,
        rank_view: RankView | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        trace = Trace.open(golden / TRACE)
        packed = PackedTrace(trace)
        self._replayer = Replayer(packed, boundary, model.attention, model.pointwise)
        self._gradients = GradientReplayer(packed, boundary, loss_scale=loss_scale)
        self._handler = StageReplayer(trace, boundary, rows)
        self._replayer.unmeasured = self._gradients.unmeasured = opened.traits.unmeasured_ports
        self._rank_view = rank_view
        if rank_view is not None:
            self._replayer.layout = self._gradients.layout = rank_view.layout
            self._replayer.partial_modules = rank_view.partial_modules
            self._handler.is_own = rank_view.is_own_value
        over_ranks = None if rank_view is None else rank_view.summed_by_backward
        self.sums = GradientSums(boundary.rounded, over_ranks, self._gradients.micro_batches_begun)
        self.shares: list[GradientShare] = []
        self._rows = rows
        taps = GradientTaps(self._replayer, self._gradients)
        self.watch = UsageWatch(taps)
        self.watch.add_parameters_of(opened.trainer.model)
        updates = UpdateWatch(opened.trainer, self._handler, model.untrained)
        self._updates = updates
        self._observer = StepObserver(
            opened,
            self._handler,
            updates,
            ModuleTracer(self.watch),
            taps,
            rows,
            self._replayer,
            rank_view,
            packed,
            loss_scale,
            self.sums,
        )
        self._loss_scale, self._packed = loss_scale, packed
        self.attached = self._observer.attached

    def run_step(self, step: int, batch: Sequence[MicroBatch]) -> StepReport:
        """Make one step, and measure it."""
        report = self._observer.run_step(step, batch)
        self.shares += self._shares_of(step)
        return report

    def _shares_of(self, step: int) -> list[GradientShare]:
        """Return how often each micro-batch is in the step's gradients; empty if no loss shows it."""
        scales = {one.micro_batch: one for one in self.scales if one.step == step}
        if not scales or self.packings:
            return []
        found = []
        for at, number in dict.fromkeys(self.micro_batches_run):
            if at == step and (step, number) in self._rows.numbers:
                of_loss = scales[number].length if number in scales else 0.0
                found.append(
                    GradientShare(step, number, of_loss * self.sums.in_sum.get(number, 1.0))
                )
        return found

    def measured(self) -> Measured:
        """A copy of all that was measured so far."""
        return copy.deepcopy(
            Measured(
                self._replayer.results,
                self._replayer.recomputed,
                self._gradients.results,
                self._handler.results,
                self._gradients.scales,
                self._gradients.labels,
                self.shares,
                self._observer.micro_batches_run,
                self._observer.of_parameters.norms,
                [] if self._loss_scale is None else self._loss_scale.steps,
                self.sums.errors,
                self.sums.num_sharded,
                self.sums.num_narrow,
                self.moved,
            )
        )

    def go_back_to(self, measured: Measured) -> None:
        """Forget what was measured since `measured` was made; it is used up."""
        self._replayer.results, self._replayer.recomputed = measured.modules, measured.recomputed
        self._gradients.results, self._gradients.scales = measured.gradients, measured.scales
        self._gradients.labels, self.shares = measured.labels, measured.shares
        self._handler.results = measured.stages
        self._observer.micro_batches_run = measured.micro_batches_run
        self._observer.of_parameters.norms = measured.norms
        if self._loss_scale is not None:
            self._loss_scale.steps = measured.scaled_steps
        self.sums.errors = measured.errors_of_sums
        self.sums.num_sharded, self.sums.num_narrow = measured.num_sharded, measured.num_narrow
        self._updates.moved = measured.moved

    @property
    def moved(self) -> MovedElements:
        """What the updates changed."""
        return self._updates.moved

    @property
    def norms(self) -> list[GradientNorm]:
        """Of the gradients after each phase."""
        return self._observer.of_parameters.norms

    @property
    def packings(self) -> list[PackedBatch]:
        """Micro-batches that were run as one."""
        return list(self._packed.packings.values())

    @property
    def seen(self) -> list[str]:
        """Phases whose method was called."""
        return sorted(self._observer.seen)

    @property
    def micro_batches_run(self) -> list[tuple[int, int]]:
        """Step and number of every micro-batch that this process ran."""
        return self._observer.micro_batches_run

    @property
    def drew_in_backward(self) -> bool:
        """Whether a backward pass drew random numbers for good."""
        return self._observer.drew_in_backward

    @property
    def scales(self) -> list[GradientScale]:
        """Of the gradient that the loss made in each backward."""
        return self._gradients.scales

    @property
    def rank_shares(self) -> list[GradientShare]:
        """Return how often each rank's part is in the reduced gradients."""
        return self._observer.of_parameters.rank_shares

    @property
    def labels(self) -> list[LabelDifference]:
        """Return labels of the loss that differ from the reference's."""
        return self._gradients.labels

    def write(self, writer: TraceWriter) -> None:
        """Attach all measurements."""
        results = {f"stage-{phase}": self._handler.results[phase] for phase in PHASES}
        rank_view, replayer = self._rank_view, self._replayer
        finished = (
            replayer.finish() if rank_view is None else replayer.finish(rank_view.is_own_call)
        )
        results["modules"] = finished
        results["recomputed"] = replayer.recomputed
        results["gradients"] = self._gradients.results
        for name, result in results.items():
            attach_results(writer, name, result)
