"""Time of an all-reduce over two ranks."""

import time

import pytest
import torch
import torch.distributed as dist

from assay.devices.base import Device
from assay.devices.run_string import parse_run
from assay.launch import Rank, World, launch_world
from assay_bench.performance.requests import SuiteRequest
from assay_bench.performance.suites.measurement import Amounts, SuiteTimer

NUM_RANKS = 2
NUM_ELEMENTS = 1 << 20
NUM_REPEATS = 10


class RankClock:
    """A clock of the seconds that ranks spend in collectives, without their start."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def __call__(self) -> float:
        """Return the sum so far."""
        return self._seconds

    def advance(self, seconds: float) -> None:
        """Add the time of a world's slowest rank."""
        self._seconds += seconds


_CLOCK = RankClock()


def all_reduce(rank: Rank) -> tuple[float, float]:
    """Return the seconds of all repeats, after one that opens the connections, and an element of the sum."""
    values = torch.ones(NUM_ELEMENTS, device=rank.device.torch_device)
    dist.all_reduce(values)
    rank.device.synchronize()
    begun = time.perf_counter()
    for _ in range(NUM_REPEATS):
        dist.all_reduce(values)
    rank.device.synchronize()
    return time.perf_counter() - begun, float(values[0])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.benchmark(timer=_CLOCK)
def test_all_reduce(measure: SuiteTimer, suite_request: SuiteRequest, device: Device) -> None:
    """Run ten all-reduces of 4 MiB in float32. Each round starts a new world."""
    if device.torch_device != "cpu" and device.count() < NUM_RANKS:
        pytest.skip(f"needs {NUM_RANKS} devices; {device.name} has {device.count()}")
    world = World({"dp": NUM_RANKS}, device=parse_run(suite_request.run).device)

    def run_world(target: World) -> None:
        answers = launch_world(all_reduce, target)
        assert [total for _, total in answers] == [NUM_RANKS ** (NUM_REPEATS + 1)] * NUM_RANKS
        _CLOCK.advance(max(seconds for seconds, _ in answers))

    measure(lambda: world, run_world, Amounts(num_bytes=NUM_REPEATS * NUM_ELEMENTS * 4))
