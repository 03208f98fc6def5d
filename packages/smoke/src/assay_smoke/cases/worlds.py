"""The work of a case's processes: requests, worlds of ranks, and answers. Judges nothing."""

import gc
import os
import signal
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from assay.devices.base import Device
from assay.devices.registry import describe_run, open_run
from assay.devices.run_string import parse_run
from assay.errors import AssayError
from assay.launch import Rank
from assay.models import count_parameters, load_model
from assay.models.load import choose_threads
from assay.models.transformers_calls import save_pretrained
from assay.progress import Progress
from assay.training.batches import Batches, copied
from assay.training.model_batches import TrainingData
from assay.training.processes.candidate import CandidateSide
from assay.training.processes.free_run import step_until_made
from assay.training.processes.reference import TrustedSide, wide_dtype
from assay.training.protocol import MicroBatch
from assay.training.replay.determinism import comparable
from assay.training.replay.step_values import count_rows
from assay.training.reports import (
    FreeRun,
    LossCurve,
    ModelReport,
    ReferenceReport,
    StepRecord,
    TrainCheck,
    TrainerReport,
)
from assay.training.state import states
from assay.training.state.files import fingerprint, read_golden_state, state_file, write_state
from assay.training.state.parameters import local_part, named_parameters
from assay.training.trainers.reference import MODEL_FOLDER
from assay.training.trainers.registry import OpenedTrainer, declared_traits, describe_trainer
from assay.verdicts import Number, Record
from assay_smoke.judging import relative_error
from assay_smoke.matrix.rules import Checkpoint
from assay_smoke.timelines import CyclePhase, Timeline
from assay_smoke.trainers.deepspeed.partitions import whole_size

# Folders of a case.
CHECKPOINT, LAST_CHECKPOINT = "checkpoint", "last-checkpoint"
# Written by a run that got SIGTERM within a step.
TERMINATED_CHECKPOINT = "terminated-checkpoint"

Hashes = dict[str, str]


class ReferenceAnswer(Record):
    """Answer of the reference process. Its states are in its folder."""

    training: ReferenceReport
    logits_noise: Number
    """Relative error of the noise run's final logits against the yardstick's."""
    moved: list[str]
    """Parameters of which the noise run changed most elements. A narrow dtype rounds small updates away."""


class CaseRequest(NamedTuple):
    """Request to a world of a case."""

    candidate: TrainCheck
    kind: Checkpoint
    """Checkpoint that the case tries on top of those that every case tries."""
    timelines: Path
    """Folder for the phases of each rank."""
    checkpoint: Path
    """Checkpoint to resume from or to read. The folder of the case stands for none."""


class TrainAnswer(NamedTuple):
    """Answer of a rank of `train`."""

    report: TrainerReport
    before: Hashes
    """Hash of every parameter and buffer before the first step."""
    after: Hashes
    """The same after the last step."""
    parameter_bytes: int
    """Size of the rank's parameters during training."""
    kept_bytes: int
    """Size of the tensors that outlived all tear-downs."""
    kept_shapes: list[str]
    """Shapes of the largest of them."""


class ReadAnswer(Record):
    """Measurements of the last checkpoint's model in plain transformers and peft. None: not measured."""

    logits_error: Number | None = None
    """Relative error of its logits against the yardstick's."""
    adapter_effect: Number | None = None
    """Relative change of the logits by the adapter."""
    merged_errors: dict[str, Number] = Field(default_factory=dict)
    """By what was done to the adapter, the relative error against the unmerged one's logits, in float64."""
    problem: str | None = None
    """Why the model could not be read."""


_LOGITS = "logits.safetensors"


def train_reference(request: TrainCheck, _: Progress, __: Rank) -> ReferenceAnswer:
    """Train the yardstick and the noise run. Write their initial and final states to `request.folder`."""
    folder, options = request.folder, request.options
    run = parse_run(request.reference)
    device = open_run(run)
    choose_threads(count_parameters(options.model))
    wide = wide_dtype(options.model, device)
    yardstick = TrustedSide(request, device, wide)
    request, data = yardstick.plan_data()
    batches, model = data.batches, yardstick.trainer.model
    facts, initial = yardstick.begin()
    drawn = torch.get_rng_state()
    recorded, end = yardstick.train_rounded(batches, initial)
    draws = not torch.equal(drawn, torch.get_rng_state())
    write_state(state_file(folder, len(batches)), end)
    logits = logits_of(model, batches, device)
    save_file({"logits": logits}, folder / _LOGITS)

    noise = TrustedSide(request, device, None)
    free = noise.train_freely(batches, initial)
    ended = states.collect_state(noise.trainer, device.torch_device)["model"]
    before = initial["model"]
    unequal = {name: before[name].double() != value.double() for name, value in ended.items()}
    report = ReferenceReport(
        model=facts,
        reference=describe_run(device, run) | {"yardstick": wide},
        yardstick=LossCurve.of(recorded),
        noise=LossCurve.of(free),
        noise_trajectory=states.trajectory_of(noise.trainer.model, end),
        num_tokens=[step.num_tokens for step in recorded],
        num_rows=count_rows(batches),
        num_trainable=facts["num_trainable"],
        shared=states.shared_parameters(noise.trainer.model),
        draws=draws,
    )
    error = relative_error(logits_of(noise.trainer.model, batches, device), logits)
    moved = sorted(name for name, one in unequal.items() if 2 * float(one.double().mean()) > 1)
    return ReferenceAnswer(training=report, logits_noise=error, moved=moved)


def logits_of(model: nn.Module, batches: Batches, device: Device) -> Tensor:
    """Compute logits on the micro-batches of the first step, without dropout.

    Returns: float32 on the host, (N, V), at the N positions without padding.
    """
    was_training, dtype = model.training, next(model.parameters()).dtype
    model.eval()
    conditions = comparable(str(dtype).removeprefix("torch."), device)
    with torch.no_grad(), device.execution(), conditions:
        rows = []
        for batch in batches[0]:
            ids, mask = (
                batch[key].to(device.torch_device) for key in ("input_ids", "attention_mask")
            )
            logits = model(input_ids=ids, attention_mask=mask).logits
            rows.append(logits[mask.bool()].float().cpu())
    model.train(was_training)
    return torch.cat(rows)


# Folder next to `model` with the merged weights, if the trainer writes them.
MERGED_FOLDER = "merged"


def read(request: CaseRequest, _: Progress, rank: Rank) -> ReadAnswer:
    """Load the model of a checkpoint in a world of one rank and measure its logits."""
    timeline = Timeline(request.timelines / "rank-0.jsonl", rank.device)
    with timeline.phase("read"):
        try:
            return _read(request, rank)
        except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
            return ReadAnswer(problem=f"{type(error).__name__}: {error}")


def _read(request: CaseRequest, rank: Rank) -> ReadAnswer:
    check, folder = request.candidate, request.checkpoint / MODEL_FOLDER
    batches, dtype = TrainingData.read(check.golden).batches, parse_run(check.candidate).dtype
    has_adapter = check.options.lora
    source, adapter = (check.options.model, folder) if has_adapter else (str(folder), None)
    expected = load_file(check.golden / _LOGITS)["logits"]
    logits = logits_of(_load(source, dtype, rank, adapter), batches, rank.device)
    error = relative_error(logits, expected)
    if not has_adapter:
        return ReadAnswer(logits_error=error)
    return _read_adapter(request, folder, batches, rank).model_copy(update={"logits_error": error})


def _read_adapter(request: CaseRequest, folder: Path, batches: Batches, rank: Rank) -> ReadAnswer:
    """Measure the unmerged adapter and, if requested, the merged one, in float64."""
    with tempfile.TemporaryDirectory() as temporary:
        base, merged = Path(temporary) / "base", Path(temporary) / "merged"
        # Saved in float64 first: some models create buffers in the dtype of the loaded file.
        save_pretrained(_load(request.candidate.options.model, "float64", rank), base)
        model = _load(str(base), "float64", rank, folder)
        logits_of_model = partial(logits_of, batches=batches, device=rank.device)
        unmerged = logits_of_model(model)
        with model.disable_adapter():
            effect = relative_error(unmerged, logits_of_model(model))
        if request.kind != "merged":
            return ReadAnswer(adapter_effect=effect)
        logits = {}
        model.merge_adapter()
        logits["merged into the weights"] = logits_of_model(model)
        model.unmerge_adapter()
        logits["merged and unmerged"] = logits_of_model(model)
        if (request.checkpoint / MERGED_FOLDER).is_dir():
            merged = request.checkpoint / MERGED_FOLDER
        else:
            save_pretrained(model.merge_and_unload(), merged)
        logits["merged, saved and loaded"] = logits_of_model(_load(str(merged), "float64", rank))
        errors = {how: relative_error(one, unmerged) for how, one in logits.items()}
        return ReadAnswer(adapter_effect=effect, merged_errors=errors)


def _load(source: str, dtype: str, rank: Rank, adapter: Path | None = None) -> Any:  # noqa: ANN401 - transformers' or peft's model
    model: Any = load_model(source, dtype=dtype, device=rank.device.torch_device).model
    if adapter is None:
        return model
    from peft import PeftModel

    with warnings.catch_warnings():
        # peft uses the old name of an attribute of transformers.
        warnings.simplefilter("ignore", FutureWarning)
        return PeftModel.from_pretrained(model, adapter).eval()


_METHODS: dict[str, CyclePhase] = {
    "step": "step", "save": "checkpoint", "load": "resume", "teardown": "tear-down",
}  # fmt: skip
_SHOWN = 3


class WatchedSide(CandidateSide):
    """Opens trainers that record each call as a phase.

    ended: hashes of each trainer's model at its teardown, in order.
    """

    def __init__(self, request: CaseRequest, rank: Rank) -> None:
        super().__init__(request.candidate, rank)
        self.timeline = Timeline(request.timelines / f"rank-{rank.number}.jsonl", self.device)
        self.resume_at = request.candidate.options.resume_at
        self.folder = request.candidate.folder.parent
        self.ended: list[Hashes] = []

    def open(self) -> OpenedTrainer:
        """Open and set up a trainer."""
        with self.timeline.phase("set-up"):
            opened = super().open()
        self._num_steps = 0
        for method, phase in _METHODS.items():
            call = partial(self._call, opened, getattr(opened.trainer, method), phase)
            setattr(opened.trainer, method, call)
        return opened

    def _call(
        self,
        opened: OpenedTrainer,
        original: Callable[..., Any],
        phase: CyclePhase,
        *args: Any,  # noqa: ANN401 - of any trainer
    ) -> Any:  # noqa: ANN401
        """Call a method of the trainer as a phase."""
        if phase == "tear-down":
            self.ended.append(hash_model(opened, self.device.torch_device))
        with self.timeline.phase(phase, self._num_steps if phase == "step" else None):
            result = original(*args)
        if phase == "step":
            self._num_steps = getattr(result, "step", self._num_steps) + 1
        elif phase == "resume":
            self._num_steps = self.resume_at
        return result


def hash_model(opened: OpenedTrainer, torch_device: str) -> Hashes:
    """Hash every whole parameter and buffer. A collective."""
    return fingerprint({"model": states.current_state(opened.trainer, torch_device)["model"]})


def held_parameter_bytes(opened: OpenedTrainer, num_ranks: int) -> int:
    """Return the size of this rank's parameters or shards.

    A parameter that is whole only during its use, as under ZeRO-3, counts as an even share.
    """
    tensors = [item.tensor for item in named_parameters(opened.trainer.model)]
    held = [local_part(one).numel() or whole_size(one) // num_ranks for one in tensors]
    return sum(count * one.element_size() for count, one in zip(held, tensors, strict=True))


def live_tensors() -> dict[int, Tensor]:
    """Return every tensor that Python's garbage collector knows, by identity."""
    gc.collect()
    # type() instead of isinstance(): `__class__` of an arbitrary object may run code.
    return {id(item): item for item in gc.get_objects() if issubclass(type(item), Tensor)}


def survivors(before: dict[int, Tensor]) -> tuple[int, list[str]]:
    """Return the size of live tensors that are not in `before`, one per storage, and the largest shapes."""
    new = [one for key, one in live_tensors().items() if key not in before and _has_storage(one)]
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in new}
    largest = sorted(storages.values(), key=lambda tensor: -tensor.untyped_storage().nbytes())
    shapes = [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in largest[:_SHOWN]]
    return sum(tensor.untyped_storage().nbytes() for tensor in largest), shapes


def _has_storage(tensor: Tensor) -> bool:
    if isinstance(tensor, DTensor):  # the garbage collector also knows the local tensor
        return False
    # Fake tensors of compilers name a real device, and their storage is on `meta`.
    return tensor.layout is torch.strided and tensor.untyped_storage().device.type != "meta"


def train(request: CaseRequest, _: Progress, rank: Rank) -> TrainAnswer:
    """Set up, train, save, train on and tear down; then resume in the same process."""
    side = WatchedSide(request, rank)
    alive = live_tensors()
    report, before, size_bytes = _train(side, request, rank)  # its trainers are gone afterwards
    return TrainAnswer(report, before, side.ended[0], size_bytes, *survivors(alive))


def _train(
    side: WatchedSide, request: CaseRequest, rank: Rank
) -> tuple[TrainerReport, Hashes, int]:
    """Return the report, the hashes before the first step, and the size of the rank's parameters."""
    opened = side.open()
    begin = side.begin(opened)
    trainer = opened.trainer
    states.inject_state(trainer, begin.own, side.device.torch_device)
    before = hash_model(opened, side.device.torch_device)
    described = describe_trainer(request.candidate.trainer, side.plan, trainer.model)
    parameter_bytes = held_parameter_bytes(opened, rank.size)
    report = TrainerReport(
        run=describe_run(side.device, side.run) | described,
        free=side.train_freely(opened, begin),
        coordinates=side.coordinates,
        traits=declared_traits(opened),
        model=ModelReport(weights_different=begin.different, absent=begin.absent),
    )
    return report, before, parameter_bytes


def terminate(request: CaseRequest, _: Progress, rank: Rank) -> tuple[list[StepRecord], bool]:
    """Train until SIGTERM arrives within a step, then save. Return the steps, and True if it arrived."""
    side = WatchedSide(request, rank)
    opened = side.open()
    begin = side.begin(opened)
    states.inject_state(opened.trainer, begin.own, side.device.torch_device)
    steps: list[StepRecord] = []
    signals: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    try:
        with comparable(side.run.dtype, side.device):
            for number, batch in enumerate(side.batches):
                if number + 1 == side.resume_at:
                    _send_within_step(opened.root)
                steps.append(make_step(opened, batch))
                if signals:
                    opened.trainer.save(side.folder / TERMINATED_CHECKPOINT)
                    break
    finally:
        signal.signal(signal.SIGTERM, previous)
    return steps, bool(signals)


def _send_within_step(root: nn.Module) -> None:
    """Send SIGTERM to this process after the next forward pass."""

    def send(*_: object) -> None:
        handle.remove()
        os.kill(os.getpid(), signal.SIGTERM)

    handle = root.register_forward_hook(send)


def resume(request: CaseRequest, _: Progress, rank: Rank) -> FreeRun:
    """Continue from the checkpoint in new processes, save at the end, and tear down.

    Returns: the resumed steps, and the values that this rank holds after the last of them.
    """
    side = WatchedSide(request, rank)
    opened = side.open()
    # Another generator state than the saving process had: equal seeds would hide an unrestored one.
    torch.manual_seed(request.candidate.options.seed + 1)
    try:
        opened.trainer.load(request.checkpoint)
    except (AssayError, OSError, ValueError, KeyError, RuntimeError) as error:
        return FreeRun(problem=f"the checkpoint cannot be read: {type(error).__name__}: {error}")
    with comparable(side.run.dtype, side.device):
        steps = [make_step(opened, batch) for batch in side.batches[side.resume_at :]]
    end = read_golden_state(side.golden, len(side.batches))
    resumed = FreeRun(
        resumed=steps,
        held=[[*states.hash_held_parts(opened.trainer).items()]],
        resumed_trajectory=states.trajectory_of(opened.trainer.model, end),
    )
    opened.trainer.save(side.folder / LAST_CHECKPOINT)
    opened.trainer.teardown()
    return resumed


def restart(request: CaseRequest, _: Progress, rank: Rank) -> StepRecord:
    """Make the first step of another run that starts from the saved model."""
    side = WatchedSide(request, rank)
    batch = side.batches[side.resume_at]
    side.plan = replace(side.plan, model=str(request.checkpoint / MODEL_FOLDER))
    opened = side.open()
    with comparable(side.run.dtype, side.device):
        step = make_step(opened, batch)
    opened.trainer.teardown()
    return step


def make_step(opened: OpenedTrainer, batch: Sequence[MicroBatch]) -> StepRecord:
    """Make one optimizer step, repeated while it is skipped."""
    # A skipped step changes nothing, so nothing has to be undone.
    done, num_skipped = step_until_made(lambda: opened.trainer.step(copied(batch)), lambda: None)
    return StepRecord(
        step=done.step,
        loss=done.loss,
        num_tokens=done.num_tokens,
        grad_norm=done.grad_norm,
        num_skipped=num_skipped,
    )
