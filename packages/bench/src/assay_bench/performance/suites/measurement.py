"""Timing of one suite, with the controls between its rounds."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

from assay.devices.base import Device
from assay.devices.registry import describe_run
from assay.devices.run_string import parse_run
from assay_bench.performance.requests import NUM_WARMUP_ROUNDS, SuiteRequest
from assay_bench.performance.suites.controls import Controls, ControlTimes
from assay_bench.performance.suites.turn_client import TurnClient

T = TypeVar("T")


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


class SuiteTimer:
    """Timer of one suite, which its test calls once."""

    def __init__(
        self,
        suite: str,
        request: SuiteRequest,
        device: Device,
        benchmark: Benchmark,
        turns: TurnClient,
    ) -> None:
        self._suite, self._request, self._device = suite, request, device
        self._benchmark, self._turns = benchmark, turns

    def __call__(
        self, prepare: Callable[[], T], work: Callable[[T], object], amounts: Amounts
    ) -> None:
        """Time `work` on the results of `prepare`, and store the times with pytest-benchmark.

        prepare: called before each round, outside of the timed part, as are the controls.
        """
        device = self._device
        controls = Controls(device, getattr(torch, parse_run(self._request.run).dtype))
        times: list[ControlTimes] = []

        def begin() -> tuple[tuple[T], dict[str, Any]]:
            prepared = prepare()
            self._turns.wait(self._suite)
            if len(times) == NUM_WARMUP_ROUNDS:
                device.reset_peak_memory()
            times.append(controls.measure())
            return (prepared,), {}

        def finish(prepared: T) -> None:
            work(prepared)
            device.synchronize()

        self._benchmark.pedantic(
            finish, setup=begin, rounds=self._request.num_rounds, warmup_rounds=NUM_WARMUP_ROUNDS
        )
        kept = times[NUM_WARMUP_ROUNDS:]
        self._benchmark.extra_info.update(
            suite=self._suite,
            **asdict(amounts),
            matmul_seconds=[one.matmul for one in kept],
            matmul_flops=controls.matmul_flops,
            read_seconds=[one.read for one in kept],
            read_bytes=controls.read_bytes,
            peak_memory_bytes=device.peak_memory_bytes(),
            num_threads=torch.get_num_threads(),
            device=describe_run(device, parse_run(self._request.run)),
        )
        # Another process can still have rounds to run: wait before any other work.
        self._turns.wait(self._suite)
