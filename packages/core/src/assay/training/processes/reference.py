"""Trains as yardstick and as noise run, in the trusted process, and records a golden."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.comparing.coverage import Usage
from assay.devices.base import Device
from assay.devices.registry import describe_run, open_run
from assay.devices.run_string import parse_run
from assay.hooks.gradient_taps import GradientTaps
from assay.hooks.module_tracer import ModuleTracer, NullHandler
from assay.hooks.tensors import Boundary
from assay.hooks.usage import UsageWatch
from assay.models.load import choose_threads
from assay.progress import advance_task
from assay.recording.modules import GradientRecorder, PointwiseModules, Recorder
from assay.runs import Progress
from assay.trace import TraceWriter
from assay.training.batches import MicroBatch
from assay.training.processes.golden import NOISE, POINTWISE, UNTRAINED, Batches, plan_batches
from assay.training.processes.requests import ReferenceReport, TrainCheck
from assay.training.processes.run_estimate import require_resources
from assay.training.processes.trusted import TrustedSide, wide_dtype
from assay.training.protocol import StepReport
from assay.training.replay.conditions import comparable
from assay.training.replay.observing.step_observer import StepObserver
from assay.training.replay.observing.update_watch import UpdateWatch
from assay.training.replay.optimizer_results import OptimizerResults
from assay.training.replay.replayed_steps import ReplayedSteps
from assay.training.replay.run_rows import RunRows, count_rows
from assay.training.replay.stage_handlers import StageRecorder
from assay.training.replay.stage_values import TRACE
from assay.training.shapes import EQUAL_IN_A_STEP
from assay.training.state.files import read_golden_state, state_file, write_state
from assay.training.state.parameter_records import Untouched, trajectory_of
from assay.training.state.parameters import named_parameters, untrained_values
from assay.training.state.states import State, inject_state, shared_parameters
from assay.training.trainers.registry import OpenedTrainer

_EQUAL_SHAPES = (
    "the micro-batches of a step have one shape, as the trainer declares no other `pipeline_shapes`:"
    " whether a stage keeps its gradients from one shape to the next is not tried"
)


def record_reference(request: TrainCheck, progress: Progress) -> ReferenceReport:
    """Train as yardstick and as noise run, and write the golden into `request.folder`."""
    folder, options = request.folder, request.options
    run = parse_run(request.reference)
    device = open_run(run)
    batches = plan_batches(options)
    wide = wide_dtype(options.model, device)
    require_resources(request, batches, device, wide, progress)
    progress.number_phases(5)
    num_steps = len(batches)
    with progress.step(f"loads {options.model} in {wide}, for {request.dtype}"):
        yardstick = _RecordedSide(request, device, wide)
        facts, initial = yardstick.begin()
        choose_threads(facts["num_parameters"])
    drawn = torch.get_rng_state()
    with progress.task("trains, and records every stage", num_steps, "steps"):
        recorded = yardstick.record(batches, initial, folder)
    draws = not torch.equal(drawn, torch.get_rng_state())
    max_grad_norm = yardstick.trainer.plan.max_grad_norm
    yardstick.trainer.teardown()  # four wide numbers for each weight
    with progress.step(f"noise run: loads {options.model} in {request.dtype}"):
        noise = _RecordedSide(request, device, None)
    with progress.task("noise run: trains freely", num_steps, "steps"):
        free = noise.train_freely(batches, initial)
        trajectory = trajectory_of(noise.trainer.model, read_golden_state(folder, len(batches)))
    with progress.task("noise run: measures every stage", num_steps, "steps"):
        noise.replay(batches, folder)
        shared = shared_parameters(noise.trainer.model)
    return ReferenceReport(
        model=facts,
        reference=describe_run(device, run) | {"yardstick": wide},
        yardstick_losses=[step.loss for step in recorded],
        noise_losses=[step.loss for step in free],
        noise_trajectory=trajectory,
        num_tokens=[step.num_tokens for step in recorded],
        num_rows=count_rows(batches),
        num_trainable=facts["num_trainable"],
        shared=shared,
        draws=draws,
        load=noise.trainer.load_report,
        notes=[
            *_notes_on_clipping([step.grad_norm for step in recorded], max_grad_norm),
            *([_EQUAL_SHAPES] if options.shapes in EQUAL_IN_A_STEP else []),
        ],
        usage=yardstick.usage,
        untouched=yardstick.untouched.names,
    )


def _notes_on_clipping(norms: Sequence[float], max_norm: float) -> list[str]:
    """Note that all gradient norms are on one side of the limit, so that the other is not tried."""
    if min(norms) <= max_norm < max(norms):
        return []
    side, other = ("above", "below") if min(norms) > max_norm else ("below", "above")
    return [f"gradient norms are {side} {max_norm:g} in all steps: clipping {other} is not tried"]


class _RecordedSide(TrustedSide):
    """The trusted trainer, whose stages are recorded or measured against a recording."""

    def __init__(self, request: TrainCheck, device: Device, wide: str | None) -> None:
        super().__init__(request, device, wide)
        self.untouched = Untouched()
        self.usage = Usage()

    @property
    def boundary(self) -> Boundary:
        return Boundary.exact_inputs_for(getattr(torch, self.request.dtype))

    def record(self, batches: Batches, initial: State, folder: Path) -> list[StepReport]:
        """Record every stage of every step, each from values rounded to the candidate's dtype."""
        state, reports = initial, []
        manifest: dict[str, Any] = {"dtype": self.request.dtype, "kind": "training"}
        with TraceWriter(folder / TRACE, manifest) as writer:
            recorder = Recorder(writer, self.boundary)
            gradients = GradientTaps(recorder, GradientRecorder(writer, self.boundary))
            handler = StageRecorder(writer, self.boundary, self.trainer.plan)
            opened = OpenedTrainer.of(self.trainer, "reference")
            updates = UpdateWatch(self.trainer, handler)
            rows = RunRows.of_batches(batches)
            watch = UsageWatch(gradients)
            watch.add_parameters_of(self.trainer.model)
            tracer = ModuleTracer(watch)
            observer = StepObserver(opened, handler, updates, tracer, gradients, rows)
            with observer.attached(), comparable(self.dtype, self.device), watch.reading():
                for step, batch in enumerate(batches):
                    inject_state(self.trainer, state, self.device.torch_device)
                    handler.optimizer = self._optimizer_results(folder, step)
                    del state
                    reports.append(observer.run_step(step, batch))
                    self.untouched.add(self.trainer.model)
                    state = self.rounded_state()
                    write_state(state_file(folder, step + 1), state)
                    advance_task("steps")
        self.usage = Usage.model_validate(watch.to_json())
        return reports

    def _optimizer_results(self, golden: Path, step: int) -> OptimizerResults:
        """Return what AdamW makes of the state before `step` and the gradients after clipping."""
        parameters = {
            (one.module, one.name.removeprefix(one.module).removeprefix(".")): one.tensor
            for one in named_parameters(self.trainer.model)
        }

        def gradient_of(module: str, name: str) -> Tensor | None:
            gradient = parameters[module, name].grad
            return None if gradient is None else gradient.cpu()

        read_state = partial(read_golden_state, golden, step)
        return OptimizerResults(self.trainer.plan, step, read_state, gradient_of)

    def replay(self, batches: Batches, folder: Path) -> None:
        """Measure this trainer against the recorded yardstick."""
        pointwise = self._find_pointwise(batches[0][0])
        opened = OpenedTrainer.of(self.trainer, "reference")
        rows = RunRows.of_batches(batches)
        observer = ReplayedSteps(opened, folder, rows, self.boundary, pointwise)
        with observer.attached(), comparable(self.dtype, self.device):
            for step, batch in enumerate(batches):
                state = read_golden_state(folder, step)
                inject_state(self.trainer, state, self.device.torch_device)
                self.trainer.load_counters({"num_steps": step})
                observer.run_step(step, batch)
                advance_task("steps")
        with TraceWriter(folder / NOISE, {"kind": "training-noise"}) as writer:
            observer.write(writer)
            writer.attach_json(POINTWISE, sorted(pointwise))
            writer.attach_json(UNTRAINED, sorted(untrained_values(self.trainer.model)))

    def _find_pointwise(self, micro_batch: MicroBatch) -> frozenset[str]:
        """Find modules whose own code only rounds element by element."""
        tracer = ModuleTracer(NullHandler())
        pointwise = PointwiseModules(tracer)
        with tracer.attached(self.trainer.model), pointwise, torch.no_grad():
            self.trainer.compute_loss(self.trainer.on_device(micro_batch), 1)
        return pointwise.paths
