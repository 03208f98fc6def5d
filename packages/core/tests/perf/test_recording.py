"""The cost of recording compared with the forward pass and the writing that it consists of."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import assay
from assay.trace import Trace
from packages.core.tests.perf.conftest import Table
from packages.core.tests.perf.stopwatch import Times, median_ratio, median_times, take_turns

ROUNDS = 9


def test_recording_costs_little_more_than_the_pass_and_the_writing(
    model: nn.Module,
    input_ids: torch.Tensor,
    new_folder: Callable[[], Path],
    table: Table,
) -> None:
    folder = new_folder()

    @torch.no_grad()
    def forward() -> None:
        model(input_ids=input_ids)

    calls: list[Times] = []

    def record(*, stats_only: bool = False) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        with assay.capture(model, folder, stats_only=stats_only):
            call = Times.of(forward)
        if not stats_only:
            calls.append(call)

    record()
    trace = Trace.open(folder)
    num_bytes = trace.unique_bytes
    data = os.urandom(1 << 20) * -(-num_bytes >> 20)
    copy = new_folder()

    def write() -> None:
        copy.unlink(missing_ok=True)
        with copy.open("wb", buffering=0) as file:
            file.write(memoryview(data)[:num_bytes])
            os.fsync(file.fileno())  # the speed of the disk, not of the page cache

    times = take_turns(
        {
            "forward": forward,
            "write": write,
            "module": record,
            "statistics": lambda: record(stats_only=True),
        },
        ROUNDS,
    )
    needed = [a + b for a, b in zip(times["forward"], times["write"], strict=True)]
    size = f"{len(list(trace.sites()))} tensors, {num_bytes / 2**20:.0f} MiB"
    ratio = median_ratio(times["module"], needed)
    of_what = f"forward pass + writing the same bytes ({size})"
    table.at_most("capture of all modules", ratio, 1.5, of_what)
    table.at_most("the same by the clock", Times(ratio.wall, ratio.wall), 1.15, of_what)
    waited = median_times(calls[-ROUNDS:]).wall - median_times(times["forward"]).wall
    share = waited / median_times(needed).wall
    table.at_most("waiting for the capture", Times(share, share), 0.15, of_what)
    table.at_most(
        "statistics of all modules", median_ratio(times["statistics"], times["forward"]), 1.5,
        "forward pass",
    )  # fmt: skip
