"""Measures every step of a trainer against a golden, and injects the golden's values."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from assay.comparing.coverage import Usage
from assay.comparing.results import attach_results
from assay.hooks.gradient_taps import GradientTaps
from assay.hooks.module_tracer import ModuleTracer
from assay.hooks.tensors import Boundary
from assay.hooks.usage import UsageWatch
from assay.locating.gradients import GradientReplayer, LossScale
from assay.locating.modules import Replayer
from assay.locating.trace_views import PackedBatch, PackedTrace
from assay.models.config_files import attention_of
from assay.trace import Trace, TraceWriter
from assay.training.batches import MicroBatch
from assay.training.protocol import StepReport
from assay.training.replay.observing.findings import GradientShare, KeptGradients
from assay.training.replay.observing.gradient_sums import GradientSums
from assay.training.replay.observing.step_observer import StepObserver
from assay.training.replay.observing.update_watch import UpdateWatch
from assay.training.replay.rank_scope import RankScope
from assay.training.replay.run_rows import RunRows
from assay.training.replay.stage_handlers import StageReplayer
from assay.training.replay.stage_values import PHASES, TRACE
from assay.training.trainers.registry import OpenedTrainer


class ReplayedSteps:
    """Measures a trainer against a golden, whose values are injected into every stage.

    Call `run_step` inside of `attached()`, and `write` after the last step.

    pointwise: modules whose own code only rounds element by element.
    untrained: buffers and frozen parameters of the reference's model; None for all.
    """

    def __init__(
        self,
        opened: OpenedTrainer,
        golden: Path,
        rows: RunRows,
        boundary: Boundary,
        pointwise: frozenset[str],
        untrained: frozenset[str] | None = None,
        scope: RankScope | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        trace = Trace.open(golden / TRACE)
        packed = PackedTrace(trace)
        self._replayer = Replayer(packed, boundary, attention_of(opened.trainer.model), pointwise)
        self.gradients = GradientReplayer(packed, boundary, loss_scale=loss_scale)
        self._handler = StageReplayer(golden, boundary, rows, scope=scope, trace=trace)
        self._replayer.unmeasured = self.gradients.unmeasured = opened.traits.unmeasured_ports
        self._scope = scope
        if scope is not None:
            self._replayer.layout = self.gradients.layout = scope.layout
            self._replayer.partial_modules = scope.partial_modules
        over_ranks = None if scope is None else scope.summed_by_backward
        self.sums = GradientSums(boundary.rounded, over_ranks, self.gradients.micro_batches_begun)
        self._rows = rows
        taps = GradientTaps(self._replayer, self.gradients)
        self.watch = UsageWatch(taps)
        self.watch.add_parameters_of(opened.trainer.model)
        self.updates = UpdateWatch(opened.trainer, self._handler, untrained)
        self.observer = StepObserver(
            opened,
            self._handler,
            self.updates,
            ModuleTracer(self.watch),
            taps,
            rows,
            self._replayer,
            scope,
            packed,
            loss_scale,
            self.sums,
        )
        self.found, self.of_gradients = self.observer.found, self.observer.of_gradients
        self._packed = packed
        self.attached = self.observer.attached
        # Measurements of a step that is skipped later are discarded.
        owners: list[tuple[Any, Sequence[str]]] = [
            (self._replayer, ("results", "recomputed")),
            (self.gradients, ("results", "scales", "labels")),
            (self._handler, ("results",)),
            (self.found, ("micro_batches_run",)),
            (self.of_gradients, list(vars(self.of_gradients))),
            (self.updates, ("moved",)),
            (loss_scale, () if loss_scale is None else ("steps",)),
        ]
        self._measured = [(owner, name) for owner, names in owners for name in names]

    def run_step(self, step: int, batch: Sequence[MicroBatch]) -> StepReport:
        """Make one step, and measure it."""
        report = self.observer.run_step(step, batch)
        self.of_gradients.shares += self._shares_of(step)
        if self.sums.kept[1]:
            self.of_gradients.kept.append(KeptGradients(step, *self.sums.kept))
        return report

    def _shares_of(self, step: int) -> list[GradientShare]:
        """Return how often each micro-batch is in the step's gradients; empty if no loss shows it."""
        scales = {one.micro_batch: one for one in self.gradients.scales if one.step == step}
        if not scales or self.packings:
            return []
        found = []
        for at, number in dict.fromkeys(self.found.micro_batches_run):
            if at == step and (step, number) in self._rows.numbers:
                of_loss = scales[number].length if number in scales else 0.0
                found.append(
                    GradientShare(step, number, of_loss * self.sums.in_sum.get(number, 1.0))
                )
        return found

    def measured(self) -> list[Any]:
        """Copy all measurements so far."""
        return copy.deepcopy([getattr(owner, name) for owner, name in self._measured])

    def go_back_to(self, measured: list[Any]) -> None:
        """Restore a copy of what `measured` returned, so that a skipped step can be discarded."""
        for (owner, name), value in zip(self._measured, copy.deepcopy(measured), strict=True):
            setattr(owner, name, value)

    @property
    def packings(self) -> list[PackedBatch]:
        """Micro-batches that were run as one."""
        return list(self._packed.packings.values())

    def write(self, writer: TraceWriter) -> None:
        """Attach all measurements, and finish the findings."""
        self.found.packed = sorted({packing.micro_batches for packing in self.packings})
        self.found.usage = Usage.model_validate(self.watch.to_json())
        results = {f"stage-{phase}": self._handler.results[phase] for phase in PHASES}
        scope, replayer = self._scope, self._replayer
        results["modules"] = (
            replayer.finish() if scope is None else replayer.finish(scope.is_own_call)
        )
        results["recomputed"] = replayer.recomputed
        results["gradients"] = self.gradients.results
        for name, result in results.items():
            attach_results(writer, name, result)
