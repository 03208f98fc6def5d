"""Timing of one suite, with the controls between its rounds.

The controls are the machine's own matrix product and memory read. The ratio of a round to a control just
before it depends less on the clock rate and on other work than the time itself.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

from assay.devices.base import Device
from assay.devices.registry import describe_run
from assay.devices.run_string import parse_run
from assay_bench.performance.requests import NUM_WARMUP_ROUNDS, SuiteRequest, TurnClient

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


class Benchmark(Protocol):
    """The used part of pytest-benchmark's fixture `benchmark`."""

    extra_info: dict[str, Any]

    def pedantic(
        self, target: Callable[..., object], *, setup: Callable[[], object], rounds: int,
        warmup_rounds: int,
    ) -> object:  # fmt: skip
        """Time `target` in each round, with the arguments that `setup` returns."""


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


@dataclass(frozen=True, slots=True)
class SuiteTimer:
    """Timer of one suite, which its test calls once."""

    suite: str
    request: SuiteRequest
    device: Device
    benchmark: Benchmark
    turns: TurnClient

    def __call__(
        self, prepare: Callable[[], T], work: Callable[[T], object], amounts: Amounts
    ) -> None:
        """Time `work` on the results of `prepare`, and store the times with pytest-benchmark.

        prepare: called before each round, outside of the timed part, as are the controls.
        """
        device = self.device
        controls = Controls(device, getattr(torch, parse_run(self.request.run).dtype))
        times: list[tuple[float, float]] = []

        def begin() -> tuple[tuple[T], dict[str, Any]]:
            prepared = prepare()
            self.turns.wait(self.suite)
            if len(times) == NUM_WARMUP_ROUNDS:
                device.reset_peak_memory()
            times.append(controls.measure())
            return (prepared,), {}

        def finish(prepared: T) -> None:
            work(prepared)
            device.synchronize()

        self.benchmark.pedantic(
            finish, setup=begin, rounds=self.request.num_rounds, warmup_rounds=NUM_WARMUP_ROUNDS
        )
        matmul_seconds, read_seconds = zip(*times[NUM_WARMUP_ROUNDS:], strict=True)
        self.benchmark.extra_info.update(
            suite=self.suite,
            **asdict(amounts),
            matmul_seconds=matmul_seconds,
            matmul_flops=controls.matmul_flops,
            read_seconds=read_seconds,
            read_bytes=controls.read_bytes,
            peak_memory_bytes=device.peak_memory_bytes(),
            num_threads=torch.get_num_threads(),
            device=describe_run(device, parse_run(self.request.run)),
        )
        # Another process can still have rounds to run: wait before any other work.
        self.turns.wait(self.suite)
