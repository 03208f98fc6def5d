"""The time until help is printed."""

import os
import subprocess
import sys

from packages.core.tests.perf.conftest import Table
from packages.core.tests.perf.stopwatch import Times, median_times

ROUNDS = 15


def help_times() -> Times:
    """Of a new process with compiled modules, as pip installs them; the system counts its time."""
    compiled = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    before = os.times()
    wall = Times.of(
        lambda: subprocess.run(
            [sys.executable, "-m", "assay.cli", "--help"],
            check=True,
            env=compiled,
            stdout=subprocess.DEVNULL,
        )
    ).wall
    after = os.times()
    used = after.children_user + after.children_system
    return Times(wall, used - before.children_user - before.children_system)


def test_help_takes_under_a_third_of_a_second(table: Table) -> None:
    help_times()

    table.at_most("assay --help, seconds", median_times([help_times() for _ in range(ROUNDS)]), 0.3)
