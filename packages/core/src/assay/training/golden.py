"""The trusted process of a training check: yardstick and noise run, recorded for a candidate."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from assay.devices.base import Device
from assay.devices.description import describe_run
from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.errors import UsageError
from assay.locating.gradients import GradientReplayer
from assay.locating.replay import Replayer
from assay.models import estimate_size, load_model
from assay.models.by_size import choose_threads, yardstick_dtype
from assay.recording.capture import Recorder
from assay.recording.gradients import GradientRecorder, GradientWatch
from assay.recording.hooks import Bystander, Watch
from assay.recording.operations import PointwiseStages
from assay.recording.precision import ExactDouble
from assay.recording.rounding import Border
from assay.runs import Progress
from assay.stages import StepReport, TrainingPlan
from assay.trace import Trace, TraceWriter
from assay.training.adapters import add_lora
from assay.training.batches import MicroBatch, check_batch, coder_of, padded_alike, training_batches
from assay.training.course import course_of
from assay.training.dropout import comparable_dropout
from assay.training.observing import StepObserver, named_parameters, untrained_values
from assay.training.opening import attention_of
from assay.training.reference import ReferenceTrainer
from assay.training.requests import ReferenceReport, ReferenceRequest, TrainOptions
from assay.training.spreading import Spread
from assay.training.stage_values import PHASES, StageRecorder, StageReplayer
from assay.training.state_files import read_state, write_state
from assay.training.states import (
    State,
    collect_state,
    feed_state,
    round_state,
    shared_parameters,
)

TRACE, NOISE, _POINTWISE, _UNTRAINED = "trace", "noise", "pointwise", "untrained"

Batches = Sequence[Sequence[MicroBatch]]


class Trusted(ReferenceTrainer):
    """The reference trainer as yardstick or noise run.

    The yardstick's attention is eager, whose masks have one form in all versions. The noise run
    has what the candidate has by default: fused kernels compute the probabilities anew in
    backward, with eight times the error of those that were kept.
    """

    def __init__(self, rounded_to: str | None) -> None:
        super().__init__()
        self._rounded_to = rounded_to

    def build_model(self, plan: TrainingPlan) -> nn.Module:
        """The model, its weights rounded to the candidate's dtype before they are widened."""
        model = load_model(
            plan.model,
            dtype=self.parameter_dtype(),
            device=self.device.torch_device,
            attention=None if self._rounded_to is None else "eager",
            rounded_to=self._rounded_to,
            remote_code=plan.remote_code,
        ).model
        if "lora" in plan.features:
            model = add_lora(model, plan.adapter_dropout)
        return model.train()


@contextmanager
def comparable(dtype: str, device: Device) -> Iterator[None]:
    """Inside, steps of a trainer draw and round as the check needs it."""
    with ExitStack() as stack:
        stack.enter_context(device.deterministic())
        stack.enter_context(comparable_dropout())
        if dtype == "float64":
            stack.enter_context(ExactDouble())
        yield


def plan_batches(options: TrainOptions) -> Batches:
    """The batches that both sides train on. Raises: UsageError if a step has nothing to learn."""
    batches = training_batches(
        coder_of(options.model, options.remote_code),
        steps=options.steps,
        micro_batches=options.micro_batches,
        seed=options.seed,
    )
    for batch in batches:
        check_batch(batch)
    return [padded_alike(batch) for batch in batches] if options.equal_lengths else batches


def state_file(golden: Path, step: int) -> Path:
    """Where the state before a step lies."""
    return golden / f"state-{step}"


def read_golden_state(golden: Path, step: int) -> State:
    """The state before a step, in numbers that the candidate can hold."""
    return read_state(state_file(golden, step))


def read_pointwise(golden: Path) -> frozenset[str]:
    """Modules whose own code, in the noise run, only rounded element by element."""
    return _read_names(golden, _POINTWISE)


def read_untrained(golden: Path) -> frozenset[str]:
    """Buffers and frozen parameters of the reference's model."""
    return _read_names(golden, _UNTRAINED)


def _read_names(golden: Path, kind: str) -> frozenset[str]:
    names: Any = Trace.open(golden / NOISE).attachment_json(kind)
    return frozenset(names)


def keep_no_cache(model: nn.Module) -> None:
    """Caches are for generation: a training step would fill one and throw it away."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", None):
        config.use_cache = False


def record_reference(request: ReferenceRequest, progress: Progress) -> ReferenceReport:
    """Train as yardstick and as noise run, and write the golden into `request.folder`."""
    folder, options = Path(request.folder), request.options
    run = parse_run(request.reference)
    device = open_run(run)
    batches = plan_batches(options)
    size = estimate_size(options.model)
    wide = yardstick_dtype(size.num_parameters, device.supported_dtypes())
    with progress.step(f"reference: yardstick in {wide} for {request.dtype}"):
        yardstick = _Side(request, device, wide)
        num_parameters = sum(p.numel() for p in yardstick.trainer.model.parameters())
        choose_threads(num_parameters)
        facts = describe_model(yardstick.trainer, options.model, num_parameters)
        initial = round_state(
            collect_state(yardstick.trainer, device.torch_device), getattr(torch, request.dtype)
        )
        write_state(state_file(folder, 0), initial)
        drawn = torch.get_rng_state()
        recorded = yardstick.record(batches, initial, folder)
        draws = not torch.equal(drawn, torch.get_rng_state())
    with progress.step(f"noise run in {request.dtype}"):
        noise = _Side(request, device, None)
        free = noise.train_freely(batches, initial)
        course = course_of(noise.trainer.model, read_golden_state(folder, len(batches)))
        noise.replay(batches, folder)
        shared = shared_parameters(noise.trainer.model)
    return ReferenceReport(
        model=facts,
        reference=describe_run(device, run) | {"yardstick": wide},
        yardstick_losses=[step.loss for step in recorded],
        noise_losses=[step.loss for step in free],
        noise_course=course,
        num_tokens=[step.num_tokens for step in recorded],
        num_trainable=facts["num_trainable"],
        shared=shared,
        draws=draws,
        notes=_notes_on_clipping(
            [step.grad_norm for step in recorded], yardstick.trainer.plan.max_grad_norm
        ),
    )


def _notes_on_clipping(norms: Sequence[float], max_norm: float) -> list[str]:
    """What a clip that is always or never needed does not try."""
    if min(norms) <= max_norm < max(norms):
        return []
    side, other = ("above", "below") if min(norms) > max_norm else ("below", "above")
    return [f"gradient norms are {side} {max_norm:g} in all steps: clipping {other} is not tried"]


class _Side:
    """The trusted trainer, as yardstick in the dtype `wide` or as noise run."""

    def __init__(self, request: ReferenceRequest, device: Device, wide: str | None) -> None:
        dtype = wide or request.dtype
        self._request, self._device, self._dtype = request, device, dtype
        run = f"{parse_run(request.reference).device}/{dtype}"
        self._plan = request.options.plan(run)
        self.trainer = Trusted(request.dtype if wide else None)
        self.trainer.setup(self._plan)
        keep_no_cache(self.trainer.model)

    @property
    def border(self) -> Border:
        return Border.exact_inputs_for(getattr(torch, self._request.dtype))

    def train_freely(self, batches: Batches, initial: State) -> list[StepReport]:
        """The steps of a run of which nothing is replaced."""
        feed_state(self.trainer, initial, self._device.torch_device)
        with comparable(self._dtype, self._device):
            return [self.trainer.step(batch) for batch in batches]

    def record(self, batches: Batches, initial: State, folder: Path) -> list[StepReport]:
        """Every stage of every step, each from numbers that the candidate can hold."""
        state, reports = initial, []
        manifest: dict[str, Any] = {"dtype": self._request.dtype, "kind": "training"}
        with TraceWriter(folder / TRACE, manifest) as writer:
            recorder = Recorder(writer, self.border)
            gradients = GradientWatch(recorder, GradientRecorder(writer, self.border))
            keeper = StageRecorder(writer, self.border)
            observer = StepObserver(self.trainer, keeper, Watch(gradients), gradients)
            with observer.attached(), comparable(self._dtype, self._device):
                for step, batch in enumerate(batches):
                    feed_state(self.trainer, state, self._device.torch_device)
                    reports.append(observer.run_step(step, batch))
                    state = round_state(
                        collect_state(self.trainer, self._device.torch_device),
                        getattr(torch, self._request.dtype),
                    )
                    write_state(state_file(folder, step + 1), state)
        return reports

    def replay(self, batches: Batches, folder: Path) -> None:
        """Measure this trainer against what the yardstick recorded."""
        pointwise = self._find_pointwise(batches[0][0])
        attention = attention_of(self.trainer.model)
        observer = ReplayedSteps(self.trainer, folder, self.border, attention, pointwise)
        with observer.attached(), comparable(self._dtype, self._device):
            for step, batch in enumerate(batches):
                state = read_golden_state(folder, step)
                feed_state(self.trainer, state, self._device.torch_device)
                observer.run_step(step, batch)
        with TraceWriter(folder / NOISE, {"kind": "training-noise"}) as writer:
            observer.write(writer)
            writer.attach_json(_POINTWISE, sorted(pointwise))
            writer.attach_json(_UNTRAINED, sorted(untrained_values(self.trainer.model)))

    def _find_pointwise(self, micro_batch: MicroBatch) -> frozenset[str]:
        """Modules whose own code only rounds element by element."""
        watch = Watch(Bystander())
        stages = PointwiseStages(watch)
        with watch.attached(self.trainer.model), stages, torch.no_grad():
            self.trainer.compute_loss(self.trainer.on_device(micro_batch), 1)
        return stages.modules


class ReplayedSteps:
    """A trainer that is measured against a golden, every stage fed the golden's values."""

    def __init__(
        self,
        trainer: Any,  # noqa: ANN401 - any trainer
        golden: Path,
        border: Border,
        attention: str,
        pointwise: frozenset[str],
        spread: Spread | None = None,
        untrained: frozenset[str] | None = None,
    ) -> None:
        trace = Trace.open(golden / TRACE)
        self._replayer = Replayer(trace, border, attention, pointwise)
        self._gradients = GradientReplayer(trace, border)
        self._keeper = StageReplayer(trace, border)
        self._spread = spread
        if spread is not None:
            self._replayer.layout = self._gradients.layout = spread.layout
            self._replayer.divided = spread.divided
            self._replayer.unmeasured = self._gradients.unmeasured = spread.unmeasured
            self._keeper.is_own = spread.is_own_value
        watched = GradientWatch(self._replayer, self._gradients)
        self._observer = StepObserver(
            trainer, self._keeper, Watch(watched), watched, self._replayer, spread, untrained
        )
        self.attached = self._observer.attached
        self.run_step = self._observer.run_step

    @property
    def seen(self) -> list[str]:
        """Phases whose method was called."""
        return sorted(self._observer.seen)

    @property
    def taken(self) -> list[tuple[int, int]]:
        """Step and number of every micro-batch that this process ran."""
        return self._observer.taken

    @property
    def drew_in_backward(self) -> bool:
        """Whether a backward pass drew random numbers for good."""
        return self._observer.drew_in_backward

    @property
    def scales(self) -> list[dict[str, Any]]:
        """Of the gradients that the loss gave, call by call."""
        return [
            {"step": s.step, "micro_batch": s.micro_batch, "slope": s.slope, "rest": s.rest}
            for s in self._gradients.scales
        ]

    def write(self, writer: TraceWriter) -> None:
        """Attach all measurements."""
        results = {f"stage-{phase}": self._keeper.results[phase] for phase in PHASES}
        spread, replayer = self._spread, self._replayer
        finished = replayer.finish() if spread is None else replayer.finish(spread.is_own_call)
        results["modules"] = finished
        results["recomputed"] = replayer.recomputed
        results["gradients"] = self._gradients.results
        for name, result in results.items():
            data, sums = result.to_parts()
            writer.attach_json(name, data)
            writer.attach(f"{name}-sums", sums)


def describe_model(trainer: ReferenceTrainer, name: str, num_parameters: int) -> dict[str, Any]:
    """What a verdict says of the model. Raises: UsageError if nothing of it is trained."""
    parameters = named_parameters(trainer.model)
    trainable = [item.name for item in parameters if item.tensor.requires_grad]
    if not trainable:
        raise UsageError(f"{name} has no trainable parameter")
    return {
        "name": name,
        "architecture": type(trainer.model).__name__,
        "num_parameters": num_parameters,
        "num_trainable": len(trainable),
    }
