"""Timing of one suite, with the controls between its rounds.

The controls are the machine's own matrix product and memory read. The ratio of a round to a control just
before it depends less on the clock rate and on other work than the time itself.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

from assay.devices.base import Device
from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.models import LoadedModel, load_model
from assay.models.load import choose_threads
from assay_bench.performance.records import NUM_WARMUP_ROUNDS, SuiteRequest, SuiteResult

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


@dataclass(frozen=True, slots=True)
class Amounts:
    """The amount of work of one round. Zero means not applicable."""

    num_tokens: int = 0
    num_flops: int = 0
    """Operations of matrix products, convolutions and attention, as torch counts them."""
    num_bytes: int = 0
    """Least number of bytes that are read, written or sent."""


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
        )
        choose_threads(sum(parameter.numel() for parameter in loaded.model.parameters()))
        return loaded


@dataclass(frozen=True, slots=True)
class Work(Generic[T]):
    """The work of a suite's rounds."""

    prepare: Callable[[], T]
    """Called before each round, outside of the timed part, as are the controls."""
    work: Callable[[T], object]
    """Timed, with the result of `prepare`."""
    amounts: Amounts
    one_thread: bool = False
    """True for work that does not depend on the model's size."""
    clock: Callable[[], float] = time.perf_counter

    def measure(self, suite: str, bench: Workbench, wait: Callable[[], None]) -> SuiteResult:
        """Time the rounds. wait: called before each round, when everything is prepared."""
        num_threads = torch.get_num_threads()
        if self.one_thread:
            torch.set_num_threads(1)
        device, controls = bench.device, Controls(bench.device, getattr(torch, bench.run.dtype))
        rounds = []
        for number in range(NUM_WARMUP_ROUNDS + bench.request.num_rounds):
            prepared = self.prepare()
            wait()
            if number == NUM_WARMUP_ROUNDS:
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
            **asdict(self.amounts),
        )
        torch.set_num_threads(num_threads)
        return result
