"""DeepSpeed's engine with ZeRO behind the trainer protocol, and its set-up in a process.

By itself DeepSpeed lets every process ask ninja what to compile, behind a lock file. A process that is killed
leaves the lock, and all later processes wait for it. Here its CPU Adam is compiled once per user.
"""

import importlib.util
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    redirect_stdout,
)
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.errors import MachineError, UsageError
from assay.launch import RemoteFunction, call
from assay.models.transformers_calls import save_pretrained
from assay.runs import Progress
from assay.runs.folders import cache_folder
from assay.training.protocol import (
    COMPILE,
    LOSS_SCALING,
    MIXED_PRECISION,
    PACKED,
    MicroBatch,
    StepReport,
    TrainerTraits,
    TrainingPlan,
)
from assay.training.trainers.reference import ReferenceTrainer
from assay.watchdog import watched
from assay_smoke.trainers.deepspeed.partitions import (
    PartitionedOptimizer,
    clipped_gradient,
    partitions_of,
)

_INSTALL = "the trainer deepspeed needs DeepSpeed: pip install 'assay-smoke[deepspeed]'"


def require_deepspeed() -> None:
    """Raise UsageError if DeepSpeed is not installed."""
    if find_spec("deepspeed") is None:
        raise UsageError(_INSTALL)


@contextmanager
def deepspeed_process(torch_device: str) -> Iterator[None]:
    """Make DeepSpeed usable on `torch_device` within the block.

    A single process gets a process group of one rank, which DeepSpeed requires.
    """
    with ExitStack() as stack:
        kind = torch.device(torch_device).type
        variables = {"DS_ACCELERATOR": kind, "LOCAL_RANK": "0"}
        stack.enter_context(mock.patch.dict(os.environ, variables | os.environ))
        _import_quietly()
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo" if kind == "cpu" else None,
                store=dist.HashStore(),  # type: ignore[attr-defined]  # of torch
                rank=0,
                world_size=1,
            )
            stack.callback(dist.destroy_process_group)
        stack.callback(_forget_groups)
        # Its compilation takes a minute, and only inference on the host calls it.
        stack.enter_context(mock.patch("deepspeed.comm.torch.build_shm_op", return_value=None))
        if kind == "cpu":
            # Without AVX-512, float16 is slow but correct.
            from deepspeed.accelerator import get_accelerator

            accelerator: Any = get_accelerator()
            is_supported = mock.patch.object(accelerator, "is_fp16_supported", return_value=True)
            stack.enter_context(is_supported)
        yield


def _import_quietly() -> None:
    """Import DeepSpeed. Its warnings go to standard error, and its other messages are dropped."""
    import deepspeed

    del deepspeed
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.ERROR)
    for handler in logger.handlers:
        if type(handler) is logging.StreamHandler:  # not that of a test runner
            handler.setStream(sys.stderr)


def _forget_groups() -> None:
    """Make DeepSpeed forget the process group that it found first."""
    import deepspeed
    from deepspeed.utils import groups

    deepspeed.comm.comm.cdb = None
    groups._WORLD_GROUP = None  # noqa: SLF001


# DeepSpeed's name of the extension.
_NAME = "cpu_adam"
# Relative error of updates and moments. The extension keeps betas and their powers in float32
# (csrc/includes/cpu_adam.h), whose spacing below one is 2^-24, so 1 - 0.999 (the default of torch's
# AdamW) has this relative error.
ROUNDING_OF_BETAS = 2**-25 / (1 - 0.999)


def cpu_adam(parameters: Sequence[nn.Parameter], defaults: Mapping[str, object]) -> Optimizer:
    """Return DeepSpeed's AdamW for parameters on the host. Call it within `deepspeed_process`.

    defaults: of torch's AdamW, for learning rate, betas, eps and weight decay.
    Raises: MachineError if compilation fails.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    load_extension()
    taken = {name: defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
    adam: Optimizer = DeepSpeedCPUAdam(parameters, adamw_mode=True, **taken)
    return adam


def compile_ahead(folder: Path, progress: Progress) -> None:
    """Compile the extension in its own process if it is missing. It takes a minute.

    folder: an existing one, for the log of the compiler.
    Raises: MachineError if compilation fails.
    """
    if not extension_file().is_file():
        work: RemoteFunction[None, None] = RemoteFunction(f"{__name__}:compile_alone")
        call(work, None, folder=folder, name="cpu-adam", progress=progress)


def compile_alone(_: None, progress: Progress) -> None:
    """Compile the extension in this process."""
    with progress.step("compiling DeepSpeed's CPU Adam"), deepspeed_process("cpu"):
        load_extension()


def load_extension() -> None:
    """Load the extension from the cache, compiled if missing, and register it with DeepSpeed.

    Raises: MachineError if compilation fails.
    """
    from deepspeed.ops.op_builder.builder import OpBuilder

    file = extension_file()
    if not file.is_file():
        _compile(file)
    spec = importlib.util.spec_from_file_location(_NAME, file)
    if spec is None or spec.loader is None:
        raise MachineError(f"{file} is not a Python extension: delete it to compile it again")
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise MachineError(f"{error}: delete {file} to compile it again") from error
    OpBuilder._loaded_ops[_NAME] = module  # noqa: SLF001 - where DeepSpeed looks first


def extension_file() -> Path:
    """Return the compiled file for these versions and CPU instructions.

    The folder of packages of a runner goes before the cache.
    """
    python = f"python-{sys.version_info.major}.{sys.version_info.minor}"
    instructions = torch.backends.cpu.get_cpu_capability().replace(" ", "_")
    made_of = (version("deepspeed"), "torch", torch.__version__, python, instructions)
    file = Path(f"deepspeed-{'-'.join(made_of)}", f"{_NAME}.so")
    if packages := os.environ.get("ASSAY_PACKAGES"):
        compiled = Path(packages, "assay") / file
        if compiled.is_file():
            return compiled
    return cache_folder() / file


def _compile(file: Path) -> None:
    """Compile in a temporary folder and move the complete file to its place."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    file.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=file.parent) as folder, watched("folder", folder):
        variables = mock.patch.dict(os.environ, {"TORCH_EXTENSIONS_DIR": folder})
        try:
            with variables, redirect_stdout(sys.stderr):
                CPUAdamBuilder().jit_load(verbose=False)
            (Path(folder) / _NAME / file.name).replace(file)
        except (RuntimeError, OSError, ImportError) as error:
            reason = str(error).strip().splitlines()[0]
            raise MachineError(
                f"cannot compile DeepSpeed's CPU Adam, which offload needs ({reason}): install a C++"
                " compiler and ninja"
            ) from error


class PausedCall:
    """Runs `call` in a thread, up to its call of `pause` and from there to its end.

    DeepSpeed clips and updates in one call, and a check compares the gradients between both. The caller
    waits while the thread runs, so nothing runs concurrently.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self._ended: Future[object] = Future()
        self._stopped, self._go_on = Event(), Event()

        def run() -> None:
            try:
                self._ended.set_result(call())
            except BaseException as error:  # noqa: BLE001 - raised again in the caller
                self._ended.set_exception(error)
            self._stopped.set()

        # A daemon: if the caller raises, the waiting thread must not keep the process alive.
        self._thread = Thread(target=run, name="paused call", daemon=True)

    def start(self) -> bool:
        """Run up to the pause. Return False if the call ended without one."""
        self._thread.start()
        self._stopped.wait()
        if self._ended.done():
            self._ended.result()
        return not self._ended.done()

    def pause(self) -> None:
        """Wait until `finish`. For use by `call`."""
        self._stopped.set()
        self._go_on.wait()

    def finish(self) -> None:
        """Run from the pause to the end."""
        self._go_on.set()
        self._ended.result()


@dataclass
class ShownGradients:
    """Puts whole gradients into `.grad` of `parameters` for others to read and change.

    DeepSpeed does not run between `show` and `hide`. An unchanged gradient is not written back, since
    DeepSpeed's own may be more precise.
    """

    parameters: Sequence[nn.Parameter]
    _shown: dict[nn.Parameter, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    """A copy of what was put into `.grad`, and DeepSpeed's own before it."""

    def show(self, read: Callable[[nn.Parameter], Tensor]) -> None:
        """Put the result of `read` into the `.grad` of each parameter."""
        for parameter in self.parameters:
            value, before = read(parameter), parameter.grad
            if not hasattr(parameter, "grad_dtype"):
                # Before torch 2.10 a gradient has its parameter's dtype.
                value = value.to(parameter.dtype)
            _replace_gradient(parameter, value, value.dtype)
            self._shown[parameter] = (value.clone(), before)

    def hide(self, write: Callable[[nn.Parameter, Tensor], None] | None = None) -> None:
        """Restore `.grad`, then call `write` with the gradients that were changed."""
        shown, self._shown = self._shown, {}
        changed = []
        for parameter, (copy, before) in shown.items():
            if parameter.grad is not None and not torch.equal(parameter.grad, copy):
                changed.append((parameter, parameter.grad))
            _replace_gradient(parameter, before, parameter.dtype)
        if write is not None:
            for parameter, value in changed:
                write(parameter, value.float())


def _replace_gradient(parameter: nn.Parameter, value: Tensor | None, dtype: torch.dtype) -> None:
    parameter.grad = None
    if hasattr(parameter, "grad_dtype"):
        parameter.grad_dtype = dtype
    parameter.grad = value


# DeepSpeed's defaults are for large models. They would put all gradients of a small model into one
# bucket and keep all its parameters gathered under ZeRO-3.
_NUM_BUCKETS = 4
_SMALLEST_BUCKET = 2**16
_LARGEST_BUCKET = 500_000_000  # DeepSpeed's default

# The stage of ZeRO from which on ranks divide parameters.
_DIVIDED_PARAMETERS = 3

# Larger than any model, so that one sub-group of ZeRO-3 holds all parameters. All gradients are then
# clipped before the optimizer uses the first of them.
_ALL_ELEMENTS = 10**15

_DTYPES = ("float32", "bfloat16", "float16")


def deepspeed_config(
    plan: TrainingPlan, stage: int, num_elements: int, first_scale: float
) -> dict[str, Any]:
    """Return the configuration of an engine that trains `plan`.

    stage: of ZeRO, 1 to 3. num_elements: of all trained parameters. first_scale: initial loss scale in
        float16 under loss scaling.
    Raises: UsageError for plans that DeepSpeed cannot be configured for.
    """
    dtype = parse_run(plan.run).dtype
    if dtype not in _DTYPES:
        raise UsageError(f"DeepSpeed trains in {', '.join(_DTYPES)}, not in {dtype}")
    config: dict[str, Any] = {
        # DeepSpeed only counts samples by it. Micro-batches may have other numbers of rows.
        "train_micro_batch_size_per_gpu": 1,
        # Of each rank: its share, or one if micro-batches are packed.
        "gradient_accumulation_steps": (
            1 if PACKED in plan.features else plan.micro_batches // plan.mesh.get("dp", 1)
        ),
        # Without it DeepSpeed clips at 1.0.
        "gradient_clipping": plan.max_grad_norm,
        "zero_optimization": _zero(stage, num_elements, "cpu-offload" in plan.features),
    }
    if dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
    elif dtype == "float16":
        config["fp16"] = {"enabled": True, "loss_scale": 1.0}  # a fixed scale without effect
        if LOSS_SCALING in plan.features:
            power = round(math.log2(first_scale))
            # A scale of 0 makes it dynamic.
            config["fp16"] |= {"loss_scale": 0.0, "initial_scale_power": power}
    if MIXED_PRECISION in plan.features:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        config["communication_data_type"] = "fp32"
    return config


def _zero(stage: int, num_elements: int, offload: bool) -> dict[str, Any]:  # noqa: FBT001
    bucket = min(max(num_elements // _NUM_BUCKETS, _SMALLEST_BUCKET), _LARGEST_BUCKET)
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": bucket}
    if stage == _DIVIDED_PARAMETERS:
        zero |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
            "sub_group_size": _ALL_ELEMENTS,
        }
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
        if stage == _DIVIDED_PARAMETERS:
            zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    return zero


class DeepSpeedTrainer(ReferenceTrainer):
    """A loop of `engine(...)`, `engine.backward` and `engine.step` with ZeRO-2."""

    features = (ReferenceTrainer.features | {"cpu-offload"}) - {COMPILE}
    stage = 2

    def __init__(self) -> None:
        super().__init__()
        require_deepspeed()
        self._closing = ExitStack()
        self._gathered = ExitStack()
        self._paused: PausedCall | None = None

    @property
    def traits(self) -> TrainerTraits:
        """Return the traits: each data rank has its own seed, and backward reduces gradients."""
        traits = super().traits
        if "cpu-offload" in self.plan.features:
            reason = "DeepSpeed's CPU Adam rounds powers of its betas differently after a restart"
            traits = replace(traits, inexact_resume=reason, update_rounding=ROUNDING_OF_BETAS)
        if self.data.size == 1:
            return traits
        reason = "DeepSpeed reduces gradients within backward"
        return replace(traits, invisible_phases={"reduce": reason})

    def setup(self, plan: TrainingPlan) -> None:
        """Build the model and DeepSpeed's engine."""
        device = open_run(parse_run(plan.run))
        with ExitStack() as opening:
            opening.enter_context(deepspeed_process(device.torch_device))
            super().setup(plan)
            self._gather()
            self._closing = opening.pop_all()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build DeepSpeed's engine with AdamW and return a view of its optimizer."""
        import deepspeed

        inner = super().build_optimizer(model)
        parameters = [p for group in inner.param_groups for p in group["params"]]
        if "cpu-offload" in self.plan.features:
            inner = cpu_adam(parameters, inner.defaults)
        num_elements = sum(p.numel() for p in parameters)
        config = deepspeed_config(self.plan, self.stage, num_elements, self.first_scale)
        with redirect_stdout(sys.stderr):
            self.engine: Any = deepspeed.initialize(model=model, optimizer=inner, config=config)[0]
        if LOSS_SCALING in self.plan.features and parse_run(self.plan.run).dtype != "float16":
            # A fixed loss scale, since DeepSpeed itself scales only in float16.
            if not hasattr(self.engine.optimizer, "override_loss_scale"):
                raise UsageError(
                    f"DeepSpeed has no loss scaling for {self.plan.run} in ZeRO-{self.stage}: use"
                    " deepspeed-zero2, or float16"
                )
            self.engine.optimizer.override_loss_scale(self.first_scale)
        self.partitions = partitions_of(self.engine, self.stage)
        self._gradients = ShownGradients(self.partitions.parameters)
        step = self.engine.basic_optimizer.step

        def pause_and_step(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - of any optimizer
            if self._paused is not None:
                self._paused.pause()
            return step(*args, **kwargs)

        self.engine.basic_optimizer.step = pause_and_step
        return PartitionedOptimizer(self.partitions, self.plan.learning_rate)

    def parameter_dtype(self) -> str:
        """Return the dtype of the run. DeepSpeed's float32 values are copies."""
        return parse_run(self.plan.run).dtype

    @property
    def network(self) -> nn.Module:
        """Return the engine, whose forward gathers the parameters it needs."""
        engine: nn.Module = self.engine
        return engine

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        """Make one optimizer step, and report DeepSpeed's learning rate."""
        return replace(super().step(batch), learning_rate=self.engine.get_lr()[0])

    @contextmanager
    def accumulating(self, num_left: int) -> Iterator[None]:
        """Tell DeepSpeed the end of each micro-batch. It steps after the last one."""
        self._gradients.hide()
        self._partition()
        yield
        if num_left:
            self.engine.step()

    def computing(self) -> AbstractContextManager[Any]:
        """Do nothing: parameters already have the dtype of the computation."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`. After the last micro-batch, `.grad` holds whole sums."""
        # DeepSpeed averages over micro-batches and ranks, but the losses already add up to the step's.
        self.engine.backward(loss * (self.engine.gradient_accumulation_steps() * self.data.size))
        if self.engine.is_gradient_accumulation_boundary():
            self._gather()
            self._gradients.show(self.partitions.gradient)

    def reduce_gradients(self) -> None:
        """Do nothing: backward has reduced the gradients."""

    def clip_gradients(self, max_norm: float) -> float:
        """Start the engine's step and pause it before its optimizer.

        max_norm: unused, since the configuration has it.
        """
        del max_norm
        self._gradients.hide(self.partitions.set_gradient)
        self._partition()
        paused = PausedCall(self.engine.step)
        self._paused = paused
        if not paused.start():
            self._paused = None  # a skipped step
        self._gather()
        if self._paused is not None:
            self._gradients.show(partial(self.partitions.read, held=clipped_gradient))
        return self.partitions.grad_norm()

    def adapt_scale(self) -> bool:
        """Return whether DeepSpeed skipped the step, as it does when scaled gradients overflow."""
        return not self.engine.was_step_applied()

    def optimizer_step(self) -> None:
        """Finish the engine's step unless it was skipped."""
        if self._paused is None:
            return
        used = {one: one.grad for one in self.partitions.parameters if one.grad is not None}
        self._gradients.hide(partial(self.partitions.write, held=clipped_gradient))
        self._partition()
        self._paused.finish()
        self._paused = None
        self._gather()
        self._gradients.show(lambda parameter: used[parameter])

    def _gather(self) -> None:
        """Gather whole parameters for code other than DeepSpeed's."""
        self._gathered.enter_context(self._whole_parameters())

    def _whole_parameters(self, **options: int) -> AbstractContextManager[Any]:
        if self.stage != _DIVIDED_PARAMETERS:
            return nullcontext()
        from deepspeed.runtime.zero import GatheredParameters

        gathered: AbstractContextManager[Any] = GatheredParameters(
            list(self.model.parameters()), **options
        )
        return gathered

    def _partition(self) -> None:
        """Restore DeepSpeed's division of the parameters."""
        self._gathered.close()

    def save_model(self, folder: Path) -> None:
        """Write the model, or its adapter, as a Hugging Face folder."""
        if self.stage != _DIVIDED_PARAMETERS or "lora" in self.plan.features:
            super().save_model(folder)
            return
        self._partition()
        state = self.engine._zero3_consolidated_16bit_state_dict()  # noqa: SLF001
        if self.rank == 0:
            save_pretrained(self.model, folder, state)
        self._gather()

    def save_progress(self, path: Path) -> None:
        """Write DeepSpeed's own checkpoint, in which every rank has its partitions."""
        self._partition()
        self.engine.save_checkpoint(str(path), client_state={"num_steps": self._num_steps})
        self._gather()

    def load_model(self, folder: Path) -> None:
        """Do nothing: DeepSpeed's checkpoint includes the model."""

    def load_progress(self, path: Path) -> None:
        """Read DeepSpeed's own checkpoint."""
        self._partition()
        with redirect_stdout(sys.stderr):
            _, kept = self.engine.load_checkpoint(str(path))
        self._num_steps = kept["num_steps"]
        self._gather()

    def counters(self) -> dict[str, Any]:
        """Return the number of steps and the state of the loss scaler."""
        return {"num_steps": self._num_steps, "loss_scaler": dict(self._loss_scaler())}

    def load_counters(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `counters`."""
        self._num_steps = state["num_steps"]
        self._loss_scaler().update(state["loss_scaler"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a whole state. Every rank takes its parts."""
        self._load_model_values(state["model"])
        self._load_rest(state)

    def _loss_scaler(self) -> dict[str, Any]:
        """Return the state of the loss scaler, empty if there is none."""
        for name in ("loss_scaler", "loss_scale_config"):
            if hasattr(self.engine.optimizer, name):
                found: dict[str, Any] = vars(getattr(self.engine.optimizer, name))
                return found
        return {}

    def _load_model_values(self, values: Mapping[str, Tensor]) -> None:
        self._partition()
        with self._whole_parameters(modifier_rank=0):
            self.model.load_state_dict(values)
        self._gather()

    def teardown(self) -> None:
        """Destroy the engine and release its resources."""
        self._partition()
        engine, parameters = self.engine, list(self.model.parameters())
        engine.destroy()
        del self.engine, self.partitions, self._gradients
        if self.stage == _DIVIDED_PARAMETERS:
            # ZeRO-3 would keep eleven times the model alive, in cycles through autograd that Python
            # cannot see.
            for parameter in parameters:
                parameter.grad = None
                vars(parameter).clear()
            for owner in (engine.optimizer, engine):
                vars(owner).clear()
        super().teardown()
        self._closing.close()


class Zero1Trainer(DeepSpeedTrainer):
    """ZeRO-1: ranks divide moments and float32 copies."""

    stage = 1


class Zero3Trainer(DeepSpeedTrainer):
    """ZeRO-3: ranks also divide parameters."""

    stage = 3
