"""Trains as yardstick and as noise run, in the trusted process, and records a golden.

The memory, disk and time that this takes are estimated before a large model is loaded.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from assay.devices.base import Device
from assay.devices.registry import describe_run, open_run
from assay.devices.run_string import parse_run
from assay.devices.sim import trusted_device
from assay.dtypes import ENVIRONMENT_ROUNDING, float_format
from assay.errors import AssayError, MachineError, UsageError
from assay.estimates import (
    SECONDS_PER_COMPARED_VALUE,
    SECONDS_PER_LOADED_WEIGHT,
    SECONDS_PER_STORED_BYTE,
    Speed,
    TrialCall,
    allowed_memory,
    report_unknown,
    require_disk,
)
from assay.hooks.module_tracer import ModuleTracer, NullHandler
from assay.hooks.suspension import suspended_modes
from assay.hooks.tensors import Boundary
from assay.judge.code_changes import CodeChange, find_changes
from assay.judge.coverage import Usage
from assay.judge.results import ReplayResults
from assay.models import load_model
from assay.models.config_files import record_settings
from assay.models.inspect.inspection import inspect_load
from assay.models.load import (
    SMALL_MODEL_PARAMETERS,
    choose_threads,
    count_parameters,
    load_outline,
    yardstick_dtype,
)
from assay.progress import advance_task, format_duration, format_size
from assay.recording.modules import PointwiseModules, Recorder
from assay.runs import Progress, provenance
from assay.stages import Stage
from assay.trace import TraceWriter
from assay.training.batches import Batches, plan_batches
from assay.training.model_batches import TrainingData, plan_data
from assay.training.protocol import (
    EQUAL_IN_A_STEP,
    MicroBatch,
    OtherSetting,
    StepReport,
    TrainingPlan,
    can_keep_moments,
)
from assay.training.replay.determinism import comparable, keep_no_cache
from assay.training.replay.parameter_watch import observe_update
from assay.training.replay.step_observer import ReplayedSteps, StepObserver
from assay.training.replay.step_values import (
    TRACE,
    OptimizerResults,
    RunRows,
    StageRecorder,
    StageReplayer,
    ValueAddress,
    count_rows,
    step_adamw,
)
from assay.training.reports import (
    LossCurve,
    RecordedPlan,
    ReferenceReport,
    TrainCheck,
    TrainOptions,
)
from assay.training.state.files import (
    NOISE,
    POINTWISE,
    UNTRAINED,
    read_golden_state,
    state_file,
    write_state,
)
from assay.training.state.parameters import NamedParameter, named_parameters, untrained_values
from assay.training.state.states import (
    State,
    Untouched,
    current_state,
    inject_state,
    round_state,
    shared_parameters,
    trajectory_of,
)
from assay.training.trainers.adapters import add_lora
from assay.training.trainers.reference import ReferenceTrainer
from assay.training.trainers.registry import OpenedTrainer

if TYPE_CHECKING:
    from assay.models import LoadedModel
    from assay.models.inspect.report import LoadReport


def measure_adamw(
    golden: Path,
    options: TrainOptions,
    rows: RunRows,
    dtype: str,
    arithmetic: str,
    other: OtherSetting | None = None,
) -> ReplayResults:
    """Measure updates and moments of AdamW, from a golden's clipped gradients and states.

    In float32 they are the noise for a run under mixed precision. Like the noise run, they are measured against
    the golden, parameter by parameter and without a model.

    dtype: of the golden's candidates. other: a setting that differs from the golden's.
    """
    boundary = Boundary.exact_inputs_for(getattr(torch, dtype))
    handler = StageReplayer(golden, boundary, rows)
    plan = options.plan(f"cpu/{dtype}")
    if other is not None:
        groups = plan.parameter_groups
        changed = {**groups[other.parameters], other.name: other.value}
        plan = replace(plan, parameter_groups={**groups, other.parameters: changed})
    for step in range(options.steps):
        handler.begin_step(step)
        state = read_golden_state(golden, step)
        names = state["trainable"]
        for name in names if other is None else _list_tried(state["model"], names, other):
            module, _, short = name.rpartition(".")
            address = ValueAddress(Stage(module, "clip"), f"gradient.{short}")
            gradient = handler.injected(address, torch.float32)
            if gradient is None:
                continue  # the reference has none
            before, moments = state["model"][name], state["moments"].get(name, {})
            settings = plan.settings_of(name, step)
            width = getattr(torch, arithmetic)
            weight, moments = step_adamw(before, gradient, moments, settings, width)
            item = NamedParameter(name, module, "", nn.Parameter(weight))
            observe_update(handler, item, weight.double() - before.double(), moments)
    results = handler.results["optimizer"]
    results.flush()
    return results


# Weights of one setting that are stepped again, some 12 seconds a step.
_MOST_TRIED = 100_000_000


def _list_tried(
    model: Mapping[str, Tensor], names: Iterable[str], other: OtherSetting
) -> list[str]:
    """List the parameters of a setting; of a large model, the first of those that differ in numbers alone."""
    fitting = [name for name in names if fnmatchcase(name, other.parameters)]
    if sum(model[name].numel() for name in fitting) <= _MOST_TRIED:
        return fitting
    first = {re.sub(r"\d+", "", name): name for name in reversed(fitting)}
    small = [name for name in first.values() if model[name].numel() <= _MOST_TRIED]
    return small or [min(fitting, key=lambda name: model[name].numel())]


class AdamWInFloat32(torch.optim.AdamW):
    """AdamW with moments and arithmetic in float32, for parameters in a narrower dtype.

    The noise run uses it in a dtype that cannot keep moments.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters, and round each once."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    moments = self.state.get(parameter, {})
                    new, self.state[parameter] = step_adamw(
                        parameter, parameter.grad, moments, group, torch.float32
                    )
                    parameter.copy_(new)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state without rounding moments to the dtype of their parameter, as torch does."""
        super().load_state_dict(dict(state_dict))
        parameters = [one for group in self.param_groups for one in group["params"]]
        for number, moments in state_dict["state"].items():
            self.state[parameters[number]] = _in_float32(moments)


def _in_float32(moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(torch.float32, copy=True) for name, value in moments.items()}


class TrustedTrainer(ReferenceTrainer):
    """The reference trainer as yardstick or noise run."""

    load_report: "LoadReport | None" = None
    """Findings of the noise run from loading the model."""
    loaded: "LoadedModel"
    """The yardstick's model, until its batches are planned."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build AdamW, with arithmetic in float32 if the run's dtype cannot keep its moments."""
        optimizer = super().build_optimizer(model)
        if can_keep_moments(parse_run(self.plan.run).dtype):
            return optimizer
        return AdamWInFloat32(optimizer.param_groups, lr=self.plan.learning_rate)


class Yardstick(TrustedTrainer):
    """Computes in a wide dtype, with weights and buffers rounded to `rounded_to`.

    Its attention is eager, because eager masks have one form in all versions of transformers.
    """

    def __init__(self, rounded_to: str) -> None:
        super().__init__()
        self._rounded_to = rounded_to

    def load_pretrained(self, name: str) -> nn.Module:
        """Load the model, round it, and widen it."""
        loaded = load_model(
            name,
            dtype=self.parameter_dtype(),
            device=self.device.torch_device,
            attention="eager",
            rounded_to=self._rounded_to,
            remote_code=self.plan.remote_code,
        )
        self.loaded = loaded
        return loaded.model


class NoiseTrainer(TrustedTrainer):
    """Computes in the candidate's dtype, under autocast to `autocast_to` if given.

    Its attention is the candidate's default: fused kernels recompute the probabilities in backward,
    with eight times the error of stored ones.
    """

    def __init__(self, autocast_to: torch.dtype | None = None) -> None:
        super().__init__()
        self._autocast_to = autocast_to

    def setup(self, plan: TrainingPlan) -> None:
        """Build model and optimizer, and choose how the device computes."""
        super().setup(plan)
        num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.device = trusted_device(self.device, parse_run(plan.run).dtype, num_parameters)

    def load_pretrained(self, name: str) -> nn.Module:
        """Load the model, and inspect what was loaded."""
        loaded = load_model(
            name,
            dtype=self.parameter_dtype(),
            device=self.device.torch_device,
            remote_code=self.plan.remote_code,
        )
        self.load_report = inspect_load(loaded, self.plan.remote_code).report
        self.load_report.notes += loaded.notes
        return loaded.model

    def computing(self) -> AbstractContextManager[Any]:
        """Return the context of each forward pass."""
        if self._autocast_to is None:
            return nullcontext()
        return torch.autocast(self.device_type, self._autocast_to)


def trusted_trainer(options: TrainOptions, dtype: str, wide: str | None) -> TrustedTrainer:
    """Return the yardstick in the dtype `wide`, or the noise run, for candidates in `dtype`.

    Under mixed precision a candidate's weights and buffers are in float32, and rounded only where
    they are used. The same holds for an adapter, which peft keeps in float32 next to narrower
    weights; without autocast it would compute in float32.
    """
    if wide is not None:
        return Yardstick("float32" if options.mixed_precision else dtype)
    is_narrow = options.mixed_precision and float_format(dtype).is_narrow
    return NoiseTrainer(getattr(torch, dtype) if is_narrow and options.lora else None)


def wide_dtype(model: str, device: Device) -> str:
    """Return the yardstick's dtype for MODEL on `device`."""
    return yardstick_dtype(count_parameters(model), device.supported_dtypes())


class TrustedSide:
    """Opens a trusted trainer, as yardstick in the dtype `wide` or as noise run, and trains it."""

    def __init__(self, request: TrainCheck, device: Device, wide: str | None) -> None:
        self.request, self.device, self.dtype = request, device, wide or request.dtype
        run = f"{parse_run(request.reference).device}/{self.dtype}"
        self.trainer = trusted_trainer(request.options, request.dtype, wide)
        self.trainer.setup(request.options.plan(run))
        keep_no_cache(self.trainer.model)

    def begin(self) -> tuple[dict[str, Any], State]:
        """Describe the model for a verdict, and write the state before the first step into the golden.

        Raises: UsageError if the model has no trainable parameter.
        """
        model, name = self.trainer.model, self.request.options.model
        num_trainable = sum(item.tensor.requires_grad for item in named_parameters(model))
        if not num_trainable:
            raise UsageError(f"{name} has no trainable parameter")
        facts = {
            "name": name,
            "architecture": type(model).__name__,
            "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
            "num_trainable": num_trainable,
        }
        initial = self.rounded_state()
        write_state(state_file(self.request.folder, 0), initial)
        return facts, initial

    def plan_data(self) -> tuple[TrainCheck, TrainingData]:
        """Plan the batches of the model of this yardstick, and write them into the golden.

        Returns: the request with the loss of their labels, which this trainer has from now on.
        """
        request = self.request
        with comparable(self.dtype, self.device):  # as it trains: some masks are NaN otherwise
            data = plan_data(self.trainer.loaded, request.options)
        data.write(request.folder)
        del self.trainer.loaded
        options = request.options.model_copy(update={"loss": data.loss})
        self.request = replace(request, options=options)
        self.trainer.plan = replace(self.trainer.plan, loss=data.loss)
        return self.request, data

    def rounded_state(self) -> State:
        """Return the trainer's current state, rounded to the candidate's dtype."""
        state, dtype = current_state(self.trainer, self.device.torch_device), self.request.dtype
        moments = dtype if can_keep_moments(dtype) else "float32"
        return round_state(state, getattr(torch, dtype), getattr(torch, moments))

    def train_freely(self, batches: Batches, initial: State) -> list[StepReport]:
        """Train without injection."""
        inject_state(self.trainer, initial, self.device.torch_device)
        with comparable(self.dtype, self.device):
            reports = []
            for batch in batches:
                reports.append(self.trainer.step(batch))
                advance_task("steps")
            return reports

    def train_rounded(self, batches: Batches, initial: State) -> tuple[list[StepReport], State]:
        """Train with the state rounded to the candidate's dtype before each step; return its end."""
        state, reports = initial, []
        with comparable(self.dtype, self.device):
            for batch in batches:
                inject_state(self.trainer, state, self.device.torch_device)
                reports.append(self.trainer.step(batch))
                state = self.rounded_state()
        return reports, state

    @property
    def boundary(self) -> Boundary:
        """Return the boundary of a run whose stages all get inputs that the candidate's dtype can hold."""
        return Boundary.exact_inputs_for(getattr(torch, self.request.dtype))

    def record(
        self, batches: Batches, initial: State, folder: Path
    ) -> tuple[list[StepReport], Usage, list[str]]:
        """Record every stage of every step, each from values rounded to the candidate's dtype.

        Returns: the reports of the steps, the used parts of the model, and the parameters without gradient.
        """
        state, untouched = initial, Untouched()
        reports: list[StepReport] = []
        manifest: dict[str, Any] = {"dtype": self.request.dtype, "kind": "training"}
        with TraceWriter(folder / TRACE, manifest) as writer:
            handler = StageRecorder(writer, self.boundary, self.trainer.plan)
            opened = OpenedTrainer.of(self.trainer, "reference")
            modules, rows = Recorder(writer, self.boundary), RunRows.of_batches(batches)
            observer = StepObserver(opened, handler, modules, rows)
            reading = observer.usage.reading()
            with observer.attached(), comparable(self.dtype, self.device), reading:
                for step, batch in enumerate(batches):
                    inject_state(self.trainer, state, self.device.torch_device)
                    handler.optimizer = self._optimizer_results(folder, step)
                    del state
                    reports.append(observer.run_step(step, batch))
                    untouched.add(self.trainer.model)
                    state = self.rounded_state()
                    write_state(state_file(folder, step + 1), state)
                    advance_task("steps")
        return reports, Usage.model_validate(observer.usage.to_json()), untouched.names

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
        """Measure this trainer against the recorded yardstick, and write the results into its golden."""
        pointwise = self._find_pointwise(batches[0][0])
        observer = self.measure(batches, folder, pointwise)
        with TraceWriter(folder / NOISE, {"kind": "training-noise"}) as writer:
            observer.write(writer)
            writer.attach_json(POINTWISE, sorted(pointwise))
            writer.attach_json(UNTRAINED, sorted(untrained_values(self.trainer.model)))

    def measure(
        self,
        batches: Batches,
        folder: Path,
        pointwise: frozenset[str] = frozenset(),
        observe: Callable[[ReplayedSteps], object] = lambda _: None,
    ) -> ReplayedSteps:
        """Measure this trainer against the yardstick that `folder` holds. observe: is called before the first step."""
        opened = OpenedTrainer.of(self.trainer, "reference")
        rows = RunRows.of_batches(batches)
        observer = ReplayedSteps(opened, folder, rows, self.boundary, pointwise)
        observe(observer)
        with observer.attached(), comparable(self.dtype, self.device):
            for step, batch in enumerate(batches):
                with suspended_modes():  # a yardstick makes every float32 wide
                    state = read_golden_state(folder, step)
                inject_state(self.trainer, state, self.device.torch_device)
                self.trainer.load_counters({"num_steps": step})
                observer.run_step(step, batch)
                advance_task("steps")
        return observer

    def _find_pointwise(self, micro_batch: MicroBatch) -> frozenset[str]:
        """Find modules whose own code only rounds element by element."""
        tracer = ModuleTracer(NullHandler())
        pointwise = PointwiseModules(tracer)
        with tracer.attached(self.trainer.model), pointwise, torch.no_grad():
            self.trainer.compute_loss(self.trainer.on_device(micro_batch), 1)
        return pointwise.paths


_EQUAL_SHAPES = (
    "the micro-batches of a step have one shape, as the trainer declares no other `pipeline_shapes`:"
    " whether a stage keeps its gradients from one shape to the next is not tried"
)


def record_reference(request: TrainCheck, progress: Progress) -> ReferenceReport:
    """Train as yardstick and as noise run, and write the golden into `request.folder`."""
    folder, options = request.folder, request.options
    run = parse_run(request.reference)
    device = open_run(run)
    wide = wide_dtype(options.model, device)
    require_resources(request, device, wide, progress)
    progress.number_phases(5)
    num_steps = options.steps
    with progress.step(f"loading {options.model} in {wide}, for {request.dtype}"):
        yardstick = TrustedSide(request, device, wide)
        request, data = yardstick.plan_data()
        batches = data.batches
        facts, initial = yardstick.begin()
        choose_threads(facts["num_parameters"])
    drawn = torch.get_rng_state()
    with progress.task("training, and recording every stage", num_steps, "steps"):
        recorded, usage, untouched = yardstick.record(batches, initial, folder)
    draws = not torch.equal(drawn, torch.get_rng_state())
    max_grad_norm = yardstick.trainer.plan.max_grad_norm
    yardstick.trainer.teardown()  # four wide numbers for each weight
    with progress.step(f"noise run: loading {options.model} in {request.dtype}"):
        noise = TrustedSide(request, device, None)
    with progress.task("noise run: training freely", num_steps, "steps"):
        free = noise.train_freely(batches, initial)
        trajectory = trajectory_of(noise.trainer.model, read_golden_state(folder, len(batches)))
    with progress.task("noise run: measuring every stage", num_steps, "steps"):
        noise.replay(batches, folder)
        shared = shared_parameters(noise.trainer.model)
    return ReferenceReport(
        plan=RecordedPlan(
            options=options,
            dtype=request.dtype,
            reference=request.reference,
            environment=provenance(),
            settings=record_settings(options.model, options.remote_code),
        ),
        model=facts,
        reference=describe_run(device, run) | {"yardstick": wide},
        yardstick=LossCurve.of(recorded),
        noise=LossCurve.of(free),
        noise_trajectory=trajectory,
        num_tokens=[step.num_tokens for step in recorded],
        num_rows=count_rows(batches),
        num_trainable=facts["num_trainable"],
        shared=shared,
        draws=draws,
        other_loss=data.other_loss,
        load=noise.trainer.load_report,
        notes=[
            *_notes_on_clipping([step.grad_norm for step in recorded], max_grad_norm),
            *data.notes,
            *([_EQUAL_SHAPES] if options.shapes in EQUAL_IN_A_STEP else []),
        ],
        usage=usage,
        untouched=untouched,
    )


def replay_golden(
    request: TrainCheck,
    device: Device,
    wide: str | None,
    observe: Callable[[ReplayedSteps], object] = lambda _: None,
) -> ReplayedSteps:
    """Replay a golden's steps with a trusted trainer of this environment. wide, observe: as of `TrustedSide`."""
    data = TrainingData.read(request.golden)
    options = request.options.model_copy(update={"loss": data.loss})
    side = TrustedSide(replace(request, options=options), device, wide)
    return side.measure(data.batches, request.golden, observe=observe)


def find_code_changes(request: TrainCheck, progress: Progress) -> list[CodeChange]:
    """Replay a golden's steps with the yardstick of this environment, and list changes in their order."""
    device = open_run(parse_run(request.reference))
    wide = wide_dtype(request.options.model, device)
    with progress.task("replaying the golden in this environment", request.options.steps, "steps"):
        observer = replay_golden(request, device, wide)
    rounding = ENVIRONMENT_ROUNDING["float32"]  # to which a golden rounds the norm of gradients
    return [change for one in observer.finish().values() for change in find_changes(one, rounding)]


def _notes_on_clipping(norms: Sequence[float], max_norm: float) -> list[str]:
    """Note that all gradient norms are on one side of the limit, so that the other is not checked."""
    if min(norms) <= max_norm < max(norms):
        return []
    if min(norms) > max_norm:
        return [
            f"the reference clips every step (gradient norms above {max_norm:g}): steps without clipping were not checked"
        ]
    return [f"no step was clipped (gradient norms below {max_norm:g}): clipping was not checked"]


# Results stored for each trained weight and step: its update and moments. On the host they are computed again
# from the stored gradient. Kernels of other devices may round differently, so their results are stored as well.
_RESULTS = 3
_MOMENTS = 2

# Recorded for each value of the forward pass: itself, and gradients of inputs and results of modules.
_RECORDED_PER_VALUE = 3

# Wide numbers of each trained weight in memory: gradient, moments, the weight before the step.
_WIDE_PER_TRAINED = 4

# Imports, the tensors of a call, and values that wait to be written.
_BASE_BYTES = 1000 << 20

# Approximate, on x86-64 with two cores: AdamW computed again, sums of its results, hashes and copies.
_SECONDS_PER_STEPPED_WEIGHT = 1.2e-7

# States that a candidate writes and reads again as checkpoints.
_CHECKPOINTS = 2


@dataclass(frozen=True, slots=True)
class TrainingSizes:
    """The sizes of a model, its batches and its dtypes."""

    num_weights: int
    num_trained: int
    num_values: float
    """Numbers at all module boundaries for each token of the forward pass, with logits."""
    trial: TrialCall
    tokens: Sequence[int]
    """Of each micro-batch of the run."""
    num_steps: int
    dtype: torch.dtype
    wide: torch.dtype
    moments: torch.dtype
    on_host: bool
    """True if the reference computes on the host."""

    @classmethod
    def of(cls, request: TrainCheck, batches: Batches, wide: str) -> "TrainingSizes":
        """Measure the model of `request`, without its weights; wide: the dtype of the yardstick."""
        options = request.options
        outline = load_outline(options.model, options.remote_code)
        model = outline.model
        if options.lora:
            with torch.device("meta"):
                model = add_lora(model, options.adapter_dropout)
        trial, parameters = TrialCall.of(model), list(model.parameters())
        moments = request.dtype if can_keep_moments(request.dtype) else "float32"
        return cls(
            num_weights=sum(one.numel() for one in parameters),
            num_trained=sum(one.numel() for one in parameters if one.requires_grad),
            num_values=trial.num_values + outline.vocab_size,
            trial=trial,
            tokens=[one["input_ids"].numel() for step in batches for one in step],
            num_steps=len(batches),
            dtype=getattr(torch, request.dtype),
            wide=getattr(torch, wide),
            moments=getattr(torch, moments),
            on_host=parse_run(request.reference).device == "cpu",
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of weights and moments, rounded to the candidate's dtype."""
        moments = _MOMENTS * self.num_trained * self.moments.itemsize
        return self.num_weights * self.dtype.itemsize + moments

    @property
    def golden_bytes(self) -> int:
        """Bytes of the golden: values at module boundaries, gradients of weights, states."""
        stored = Boundary.exact_inputs_for(self.dtype).stored or torch.float64
        of_weight = 1 if self.on_host else 1 + _RESULTS
        num_recorded = self.boundary_values + self.num_steps * self.num_trained * of_weight
        return int(num_recorded * stored.itemsize) + (self.num_steps + 1) * self.state_bytes

    @property
    def memory_bytes(self) -> int:
        """Peak memory of the yardstick."""
        weights = self.num_weights + _WIDE_PER_TRAINED * self.num_trained
        graph = max(self.tokens) * self.num_values * _RECORDED_PER_VALUE
        return int((weights + graph) * self.wide.itemsize) + self.state_bytes + _BASE_BYTES

    @property
    def boundary_values(self) -> float:
        """Number of recorded values at module boundaries, over all steps."""
        return sum(self.tokens) * self.num_values * _RECORDED_PER_VALUE


def _time_reference(sizes: TrainingSizes, yardstick: Speed, noise: Speed) -> float:
    """Estimate the seconds of the reference: yardstick, free noise run, and measured noise run."""

    def train(speed: Speed) -> float:
        # A backward pass has a product for the gradient of the tokens and one for that of the weights.
        return 3 * sizes.trial.seconds(speed, len(sizes.tokens), sum(sizes.tokens))

    stepped = 2 * sizes.num_steps * sizes.num_trained * _SECONDS_PER_STEPPED_WEIGHT
    compared = sizes.boundary_values * SECONDS_PER_COMPARED_VALUE
    stored = sizes.golden_bytes * SECONDS_PER_STORED_BYTE
    load = 2 * sizes.num_weights * SECONDS_PER_LOADED_WEIGHT
    return load + train(yardstick) + 2 * train(noise) + stepped + compared + stored


def require_resources(request: TrainCheck, device: Device, wide: str, progress: Progress) -> None:
    """Note the memory, disk and time that the check of `request` needs.

    A small model without a limit has no estimate, which would take as long as a phase of its check.
    Raises: MachineError, with the numbers, if memory or disk do not suffice.
    """
    is_small = count_parameters(request.options.model) < SMALL_MODEL_PARAMETERS
    if is_small and request.max_disk is None:
        return
    try:
        sizes = TrainingSizes.of(request, plan_batches(request.options), wide)
        trusted = trusted_device(device, request.dtype, sizes.num_weights)
        noise = Speed.probe(trusted, request.dtype)
        seconds = _time_reference(sizes, Speed.probe(device, wide), noise)
    except AssayError:
        raise
    except Exception as error:  # noqa: BLE001 - a model's own code may raise anything without values
        report_unknown(error, {"--disk": request.max_disk}, progress)
        return
    folder, advice = request.folder, "fewer --steps, --lora, or a smaller model"
    require_disk("the golden", sizes.golden_bytes, folder, request.max_disk, advice)
    disk = sizes.golden_bytes + _CHECKPOINTS * sizes.state_bytes
    require_disk("the check", disk, folder, None, advice)
    memory, allowed = sizes.memory_bytes, allowed_memory(device)
    if memory > allowed:
        raise MachineError(
            f"the reference needs about {format_size(memory)} of memory, but {request.reference} has"
            f" {format_size(allowed)} free. Use --lora, or a smaller model"
        )
    progress.note(
        f"the reference needs about {format_size(memory)} of memory, and the check {format_size(disk)}"
        f" of disk; the reference takes about {format_duration(seconds)}"
    )
