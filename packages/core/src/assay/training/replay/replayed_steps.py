"""Every step of a trainer, measured against a golden, whose values are injected."""

from dataclasses import dataclass
from pathlib import Path

from assay.comparing.stored_results import attach_results
from assay.hooks.boundary import Boundary
from assay.hooks.gradient_taps import GradientTaps
from assay.hooks.module_tracer import ModuleTracer
from assay.locating.gradients import GradientReplayer
from assay.locating.loss_scale import GradientScale, LossScale
from assay.locating.modules import Replayer
from assay.trace import Trace, TraceWriter
from assay.training.replay.gradient_sums import GradientSums
from assay.training.replay.rank_view import RankView
from assay.training.replay.run_rows import RunRows
from assay.training.replay.stage_replayer import StageReplayer
from assay.training.replay.stage_values import PHASES
from assay.training.replay.step_observer import StepObserver
from assay.training.replay.update_watch import UpdateWatch
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


class ReplayedSteps:
    """A trainer that is measured against a golden, whose values are injected into every stage.

    Inside of `attached()`, `run_step` makes one step; `write` comes after the last one.

    sums: how gradients were added up; moved: what the updates changed.
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
        self._replayer = Replayer(trace, boundary, model.attention, model.pointwise)
        self._gradients = GradientReplayer(trace, boundary, loss_scale=loss_scale)
        self._handler = StageReplayer(trace, boundary, rows)
        self._rank_view = rank_view
        if rank_view is not None:
            self._replayer.layout = self._gradients.layout = rank_view.layout
            self._replayer.partial_modules = rank_view.partial_modules
            self._replayer.unmeasured = self._gradients.unmeasured = rank_view.unmeasured
            self._handler.is_own = rank_view.is_own_value
        over_ranks = None if rank_view is None else rank_view.summed_by_backward
        self.sums = GradientSums(boundary.rounded, over_ranks)
        taps = GradientTaps(self._replayer, self._gradients)
        updates = UpdateWatch(opened.trainer, self._handler, model.untrained)
        self.moved = updates.moved
        self._observer = StepObserver(
            opened,
            self._handler,
            updates,
            ModuleTracer(taps),
            taps,
            rows,
            self._replayer,
            rank_view,
            loss_scale,
            self.sums,
        )
        self.attached = self._observer.attached
        self.run_step = self._observer.run_step

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
