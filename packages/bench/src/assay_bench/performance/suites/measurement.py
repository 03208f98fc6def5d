"""The fixture `measure`: rounds of one work, with the controls of the machine between them."""

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
    """What is used of the fixture `benchmark` of pytest-benchmark."""

    extra_info: dict[str, Any]

    def pedantic(
        self, target: Callable[..., object], *, setup: Callable[[], object], rounds: int,
        warmup_rounds: int,
    ) -> object:  # fmt: skip
        """Time `target` on the arguments that `setup` returns, in each round."""


@dataclass(frozen=True, slots=True)
class Amounts:
    """What one round processes; 0 for what it has none of.

    num_flops: of matrix products, convolutions and attention, as torch counts them.
    num_bytes: that are read, written or sent at least.
    """

    num_tokens: int = 0
    num_flops: int = 0
    num_bytes: int = 0


def count_flops(work: Callable[[], object]) -> int:
    """Floating-point operations of `work`, which is run once."""
    with FlopCounterMode(display=False) as counter:
        work()
    num_flops: int = counter.get_total_flops()
    return num_flops


class SuiteTimer:
    """Times one suite; each test calls it once."""

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
        """Run `work` on what `prepare` returns, and keep its times in the results of pytest-benchmark.

        prepare: called before each round; neither it nor the controls are part of a round's time.
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
        # What this process does next is no part of a round that another one has still to run.
        self._turns.wait(self._suite)
