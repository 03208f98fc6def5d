"""A world costs little more than the forks of its ranks, so that every test can have a fresh one."""

import pytest

from assay.launch import World, call
from packages.core.tests.perf.conftest import Table
from packages.core.tests.perf.stopwatch import Times
from packages.core.tests.perf.world_body import add_up


def shortest_world(size: int, rounds: int) -> Times:
    """The wall time of the fastest of several rounds. The processor time of the ranks, which are no
    children of this process, cannot be measured."""
    world = World({"dp": size})
    expected = [size * (size - 1) / 2] * size

    def launch() -> None:
        assert call(add_up, None, world=world) == expected

    clock = min(Times.of(launch).wall for _ in range(rounds))
    return Times(clock, clock)


@pytest.mark.parametrize(("size", "seconds", "rounds"), [(2, 0.15, 30), (32, 2.0, 5)])
def test_bare_world_starts_works_and_ends_in_time(
    table: Table, size: int, seconds: float, rounds: int
) -> None:
    shortest_world(2, 1)  # the first world pays for the fork server

    note = f"shortest of {rounds}, by the clock"
    table.at_most(f"world of {size} ranks, seconds", shortest_world(size, rounds), seconds, note)
