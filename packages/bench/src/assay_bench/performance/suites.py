"""The process that measures suites, and what a round of each does.

Each suite is a function that prepares it and returns its work. Between its rounds the controls are timed: the
machine's own matrix product and memory read. The ratio of a round to a control just before it depends less on the
clock rate and on other work than the time itself.
Shapes: B rows, T tokens.
"""

import gc
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import assay
from assay.devices.base import Device
from assay.devices.registry import describe_run, open_run
from assay.devices.run_string import parse_run
from assay.errors import MachineError
from assay.inputs import built_in_texts
from assay.launch import Rank, World, call
from assay.metrics import PairSums
from assay.models import LoadedModel, load_model
from assay.models.load import choose_threads
from assay.progress import Progress
from assay.trace import Trace
from assay.training.batches import coder_of, training_batches
from assay.training.protocol import MicroBatch, TrainingPlan
from assay.training.trainers.reference import ReferenceTrainer
from assay.watchdog import temporary_folder
from assay_bench.performance.records import (
    LEAST_SECONDS,
    NUM_ROUNDS,
    NUM_WARMUP_ROUNDS,
    SUITES,
    PerformanceResult,
    SuiteRequest,
    SuiteResult,
    machine_kind,
)

# Rows of the square matrices. A product takes milliseconds on the host. An accelerator needs larger matrices
# to reach its peak.
_HOST_SIZE = 512
_ACCELERATOR_SIZE = 8192

# Larger than the caches. An accelerator reads 64 MiB in a fraction of a millisecond, so it gets more.
_HOST_BYTES = 1 << 26
_ACCELERATOR_BYTES = 1 << 30

T = TypeVar("T")


def timed(work: Callable[[], object], device: Device) -> float:
    """Return the seconds until `work` and its operations on `device` are done."""
    device.synchronize()
    begun = time.perf_counter()
    work()
    device.synchronize()
    return time.perf_counter() - begun


class Controls:
    """The controls of `device`. The product runs in `dtype`."""

    def __init__(self, device: Device, dtype: torch.dtype) -> None:
        is_host = device.torch_device == "cpu"
        size = _HOST_SIZE if is_host else _ACCELERATOR_SIZE
        self.matmul_flops = 2 * size**3
        self.read_bytes = _HOST_BYTES if is_host else _ACCELERATOR_BYTES
        self._device = device
        self._left, self._right = (
            torch.ones(size, size, dtype=dtype, device=device.torch_device) for _ in range(2)
        )
        # Always float32, whose sum runs at the speed of memory on every device.
        self._memory = torch.ones(
            self.read_bytes // 4, dtype=torch.float32, device=device.torch_device
        )

    def measure(self) -> tuple[float, float]:
        """Return the seconds of a matrix product and of a pass over memory; called before every round."""
        matmul = timed(lambda: self._left @ self._right, self._device)
        return matmul, timed(self._memory.sum, self._device)


def count_flops(work: Callable[[], object]) -> int:
    """Run `work` once and count its floating-point operations."""
    with FlopCounterMode(display=False) as counter:
        work()
    num_flops: int = counter.get_total_flops()
    return num_flops


class SuiteSkippedError(Exception):
    """A suite that cannot run here, with the reason."""


class Workbench:
    """Device, model and folder of the suites of a process."""

    def __init__(self, request: SuiteRequest, folder: Path) -> None:
        self.request, self.folder = request, folder
        self.run = parse_run(request.run)
        self.device: Device = open_run(self.run)

    @cached_property
    def loaded(self) -> LoadedModel:
        """Load the model on the device, and choose the number of threads for its size."""
        loaded = load_model(
            self.request.model, dtype=self.run.dtype, device=self.device.torch_device
        ).require_language_model()
        choose_threads(sum(parameter.numel() for parameter in loaded.model.parameters()))
        return loaded


@dataclass(frozen=True, slots=True)
class Work(Generic[T]):
    """The work of a suite's rounds, and its amount in each. An amount of zero does not apply."""

    prepare: Callable[[], T]
    """Called before each round, outside of the timed part, as are the controls."""
    work: Callable[[T], object]
    """Timed, with the result of `prepare`."""
    num_tokens: int = 0
    num_flops: int = 0
    """Operations of matrix products, convolutions and attention, as torch counts them."""
    num_bytes: int = 0
    """Least number of bytes that are read, written or sent."""
    one_thread: bool = False
    """True for work that does not depend on the model's size."""
    clock: Callable[[], float] = time.perf_counter

    def measure(self, suite: str, bench: Workbench, progress: Progress) -> SuiteResult:
        """Time the rounds."""
        num_threads = torch.get_num_threads()
        if self.one_thread:
            torch.set_num_threads(1)
        device, controls = bench.device, Controls(bench.device, getattr(torch, bench.run.dtype))
        rounds: list[tuple[float, float, float]] = []
        num_rounds, end = NUM_WARMUP_ROUNDS + NUM_ROUNDS, time.monotonic() + LEAST_SECONDS
        with progress.step(f"measuring {suite}"):
            while len(rounds) < num_rounds or time.monotonic() < end:
                prepared = self.prepare()
                if len(rounds) == NUM_WARMUP_ROUNDS:
                    device.reset_peak_memory()
                times = controls.measure()
                gc.disable()
                begun = self.clock()
                self.work(prepared)
                device.synchronize()
                rounds.append((self.clock() - begun, *times))
                gc.enable()
        seconds, matmul_seconds, read_seconds = map(
            list, zip(*rounds[NUM_WARMUP_ROUNDS:], strict=True)
        )
        result = SuiteResult(
            suite=suite,
            seconds=seconds,
            matmul_seconds=matmul_seconds,
            matmul_flops=controls.matmul_flops,
            read_seconds=read_seconds,
            read_bytes=controls.read_bytes,
            peak_memory_bytes=device.peak_memory_bytes(),
            num_threads=torch.get_num_threads(),
            num_tokens=self.num_tokens,
            num_flops=self.num_flops,
            num_bytes=self.num_bytes,
        )
        torch.set_num_threads(num_threads)
        return result


NUM_MICRO_BATCHES = 2
NUM_ROWS = 2
PROMPT_LENGTH = 128
NUM_NEW_TOKENS = 16

NUM_RANKS = 2
NUM_ELEMENTS = 1 << 20
NUM_REPEATS = 10

CAPTURED_LENGTH = 64
# The size of values at a module boundary. For larger tensors the allocator of some processes requests pages
# from the system every time, which doubles their time.
COMPARED_SHAPE = (256, 1024)
NUM_PAIRS = 8


def training_step(bench: Workbench) -> Work[list[MicroBatch]]:
    """Run forward, backward, clipping and AdamW over two micro-batches with the reference trainer."""
    trainer, batch = _make_trainer(bench, NUM_MICRO_BATCHES)
    _require(math.isfinite(trainer.step(batch).loss), "the loss of a training step is not finite")
    num_tokens = sum(int(micro_batch["attention_mask"].sum()) for micro_batch in batch)
    flops = count_flops(lambda: trainer.step(batch))
    return Work(lambda: batch, trainer.step, num_tokens=num_tokens, num_flops=flops)


def prefill(bench: Workbench) -> Work[Tensor]:
    """Run one forward pass over all prompts."""
    prompts_BT = _make_prompts(bench)
    _require(bool(_prefill(bench, prompts_BT).logits.isfinite().all()), "logits are not finite")
    flops = count_flops(lambda: _prefill(bench, prompts_BT))
    work = partial(_prefill, bench)
    return Work(lambda: prompts_BT, work, num_tokens=prompts_BT.numel(), num_flops=flops)


def decode(bench: Workbench) -> Work[Any]:
    """Generate tokens one by one. Each reads at least the weights."""
    prompts_BT = _make_prompts(bench)
    output = _prefill(bench, prompts_BT)
    flops = count_flops(lambda: _decode(bench, output))
    weight_bytes = sum(parameter.nbytes for parameter in bench.loaded.model.parameters())
    return Work(
        lambda: _prefill(bench, prompts_BT),
        partial(_decode, bench),
        num_tokens=len(prompts_BT) * NUM_NEW_TOKENS,
        num_flops=flops,
        num_bytes=weight_bytes * NUM_NEW_TOKENS,
    )


def collectives(bench: Workbench) -> Work[World]:
    """Run ten all-reduces of 4 MiB in float32 over two ranks. Each round starts a new world."""
    device = bench.device
    if device.torch_device != "cpu" and device.count() < NUM_RANKS:
        raise SuiteSkippedError(f"needs {NUM_RANKS} devices; {device.name} has {device.count()}")
    world = World({"dp": NUM_RANKS}, device=bench.run.device)
    seconds_in_ranks = 0.0

    def run_world(target: World) -> None:
        nonlocal seconds_in_ranks
        answers = call(all_reduce, None, world=target)
        totals = [total for _, total in answers]
        _require(totals == [NUM_RANKS ** (NUM_REPEATS + 1)] * NUM_RANKS, f"a sum is {totals}")
        seconds_in_ranks += max(seconds for seconds, _ in answers)

    # The start of a world takes longer than its collectives, so the slowest rank's own time counts.
    return Work(
        lambda: world,
        run_world,
        num_bytes=NUM_REPEATS * NUM_ELEMENTS * 4,
        one_thread=True,
        clock=lambda: seconds_in_ranks,
    )


def all_reduce(_request: None, _progress: Progress, rank: Rank) -> tuple[float, float]:
    """Return the seconds of all repeats, after one that opens the connections, and an element of the sum."""
    values = torch.ones(NUM_ELEMENTS, device=rank.device.torch_device)
    dist.all_reduce(values)
    rank.device.synchronize()
    begun = time.perf_counter()
    for _ in range(NUM_REPEATS):
        dist.all_reduce(values)
    rank.device.synchronize()
    return time.perf_counter() - begun, float(values[0])


def capture(bench: Workbench) -> Work[Path]:
    """Run a forward pass and write every tensor of every module."""
    loaded, device = bench.loaded, bench.device
    length = min(CAPTURED_LENGTH, loaded.max_positions or CAPTURED_LENGTH)
    ids_BT = torch.arange(NUM_ROWS * length, device=device.torch_device) % loaded.vocab_size
    folder = bench.folder / "trace"

    @torch.no_grad()
    def record(target: Path) -> None:
        with assay.capture(loaded.model, target), device.execution():
            loaded.model(input_ids=ids_BT.view(NUM_ROWS, length))

    record(folder)
    return Work(
        partial(_remove, folder),
        record,
        num_tokens=ids_BT.numel(),
        num_bytes=Trace.open(folder).unique_bytes,
    )


def compare(_: Workbench) -> Work[tuple[Tensor, Tensor]]:
    """Compute all sums of a check between two tensors on the host, several times."""
    expected = torch.randn(COMPARED_SHAPE, generator=torch.Generator().manual_seed(0))
    actual = expected * (1 + 1e-7)
    rows = torch.arange(len(expected))

    def add_pairs(pair: tuple[Tensor, Tensor]) -> None:
        for _ in range(NUM_PAIRS):
            PairSums().add(*pair, rows, rows)

    num_bytes = NUM_PAIRS * (actual.nbytes + expected.nbytes)
    return Work(lambda: (actual, expected), add_pairs, num_bytes=num_bytes, one_thread=True)


def checkpoint_save(bench: Workbench) -> Work[Path]:
    """Write model, moments and generators into a new folder."""
    trainer, folder = _stepped_trainer(bench), bench.folder / "saved"
    trainer.save(folder)
    return Work(partial(_remove, folder), trainer.save, num_bytes=_bytes_in(folder))


def checkpoint_load(bench: Workbench) -> Work[Path]:
    """Read the same into a trainer that is set up."""
    trainer, folder = _stepped_trainer(bench), bench.folder / "loaded"
    trainer.save(folder)
    return Work(lambda: folder, trainer.load, num_bytes=_bytes_in(folder))


# `records.SUITES` has their names, and imports no torch.
FUNCTIONS: dict[str, Callable[[Workbench], Work[Any]]] = dict(
    zip(
        SUITES,
        (training_step, prefill, decode, collectives, capture, compare, checkpoint_save, checkpoint_load),
        strict=True,
    )
)  # fmt: skip


def _make_trainer(
    bench: Workbench, num_micro_batches: int
) -> tuple[ReferenceTrainer, list[MicroBatch]]:
    """Make the reference trainer with the micro-batches of a step."""
    _ = bench.loaded  # sets the number of threads
    model = bench.request.model
    plan = TrainingPlan(model=model, run=bench.request.run, micro_batches=num_micro_batches)
    trainer = ReferenceTrainer()
    trainer.setup(plan)
    (batch,) = training_batches(coder_of(model), steps=1, micro_batches=num_micro_batches)
    return trainer, batch


@cache
def _stepped_trainer(bench: Workbench) -> ReferenceTrainer:
    """Make a trainer after one step, so that its optimizer has moments."""
    trainer, batch = _make_trainer(bench, 1)
    trainer.step(batch)
    return trainer


def _make_prompts(bench: Workbench) -> Tensor:
    """Make prompts (B, T), shortened to the model's context."""
    loaded = bench.loaded
    if not loaded.can_generate:
        raise SuiteSkippedError(f"{loaded.source.reference} does not generate")
    longest = (loaded.max_positions or PROMPT_LENGTH + NUM_NEW_TOKENS) - NUM_NEW_TOKENS
    length = min(PROMPT_LENGTH, longest)
    ids = loaded.encode("\n".join(built_in_texts()))[: NUM_ROWS * length]
    return torch.tensor(ids, device=bench.device.torch_device).view(NUM_ROWS, -1)


@torch.no_grad()
def _prefill(bench: Workbench, prompts_BT: Tensor) -> Any:  # noqa: ANN401 - an output of transformers
    """Run whole prompts and return the output with its cache."""
    with bench.device.execution():
        return bench.loaded.model(input_ids=prompts_BT, use_cache=True)


@torch.no_grad()
def _decode(bench: Workbench, output: Any) -> None:  # noqa: ANN401 - an output of transformers
    """Generate token by token."""
    with bench.device.execution():
        for _ in range(NUM_NEW_TOKENS):
            token_B1 = output.logits[:, -1:].argmax(-1)
            output = bench.loaded.model(
                input_ids=token_B1, past_key_values=output.past_key_values, use_cache=True
            )


def _remove(folder: Path) -> Path:
    shutil.rmtree(folder)
    return folder


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _require(condition: bool, problem: str) -> None:  # noqa: FBT001 - as in `assert`
    if not condition:
        raise MachineError(problem)


def measure_suites(request: SuiteRequest, progress: Progress) -> PerformanceResult:
    """Measure the suites of `request` in this process."""
    results: list[SuiteResult] = []
    skipped: dict[str, str] = {}
    with temporary_folder("assay-suites-") as folder:
        bench = Workbench(request, folder)
        for name in request.suites:
            try:
                work = FUNCTIONS[name](bench)
            except SuiteSkippedError as error:
                skipped[name] = str(error)
            else:
                results.append(work.measure(name, bench, progress))
        device = describe_run(bench.device, bench.run)
    return PerformanceResult(
        machine=machine_kind(device, os.cpu_count()),
        run=request.run,
        model=request.model,
        suites=results,
        skipped=skipped,
        device=device,
        versions=device["versions"],
    )
