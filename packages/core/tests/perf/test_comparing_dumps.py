"""How fast and in how much memory dumps are compared, next to msprobe and to reading the files."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
import torch

from packages.core.tests.perf.conftest import Table
from packages.core.tests.perf.stopwatch import Times

ROUNDS = 3
LEAST_OVER_MSPROBE = 6
LEAST_OF_READING = 0.1
MOST_ANONYMOUS_BYTES = 600e6
MOST_GROWTH = 1.5
LEAST_OVER_DUMP = 5
CAPTURE_BUDGET = 64e6


def run(name: str, *folders: Path) -> dict[str, float]:
    """Run a function of `dump_tools` in a new process with as many threads as there are cores."""
    command = [sys.executable, "-m", "packages.core.tests.perf.dump_tools", name]
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    subprocess.run(
        [*command, *map(str, folders)], check=True, env=environment, stdout=subprocess.DEVNULL
    )
    measured: dict[str, float] = json.loads(Path(f"{folders[-1]}.json").read_text())
    return measured


def write_other_machine(golden: Path, mine: Path) -> None:
    """Copy a dump, and change every float32 result as another order of sums would.

    Equal values change alike: the tool writes a tensor for each module that gets or returns it.
    """
    shutil.copytree(golden, mine)
    for file in sorted(mine.rglob("*.pt")):
        value = torch.load(file, weights_only=True)
        is_result = isinstance(value, torch.Tensor) and value.dtype is torch.float32
        if not is_result or re.search(
            r"parameters|linear.*input\.1|embedding.*input\.1", file.name
        ):
            continue
        numbers = value.contiguous().view(torch.int32).long() * 2654435761 % 8191
        torch.save((value.double() * (1 + 2.0**-22 * (numbers / 4095 - 1))).float(), file)


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    pytest.importorskip("msprobe", reason="`nox -s perf` installs it")
    folder = tmp_path_factory.mktemp("msprobe")
    run("dump", folder / "golden")
    write_other_machine(folder / "golden", folder / "mine")
    return folder / "golden", folder / "mine"


def test_dumps_are_compared_faster_than_by_msprobe(
    dumps: tuple[Path, Path], table: Table, new_folder: Callable[[], Path]
) -> None:
    size = sum(file.stat().st_size for side in dumps for file in side.rglob("*") if file.is_file())
    run("read", *dumps, new_folder())  # all files are in the page cache now
    times: dict[str, list[dict[str, float]]] = {"msprobe": [], "assay": [], "read": []}
    for _ in range(ROUNDS):
        for name, found in times.items():
            found.append(run(name, *dumps, new_folder()))
    rates = {
        name: Times(*(size / median(one[key] for one in found) for key in ("wall", "cpu")))
        for name, found in times.items()
    }
    note = ", ".join(f"{name} {rate.wall / 1e6:.0f} MB/s" for name, rate in rates.items())
    table.at_least(
        "dumps over msprobe", rates["assay"].over(rates["msprobe"]), LEAST_OVER_MSPROBE, note
    )
    table.at_least("dumps over reading", rates["assay"].over(rates["read"]), LEAST_OF_READING, note)
    assert max(one["anonymous"] for one in times["assay"]) <= MOST_ANONYMOUS_BYTES


def test_a_capture_costs_less_than_a_dump_and_keeps_to_its_memory(
    tmp_path: Path, table: Table
) -> None:
    pytest.importorskip("msprobe", reason="`nox -s perf` installs it")
    dump, capture = run("dump", tmp_path / "dump"), run("capture", tmp_path / "capture")
    costs = [one["wall"] / one["forward"] for one in (dump, capture)]
    note = "times a plain pass: msprobe {:.1f}, assay {:.1f}".format(*costs)
    ratio = costs[0] / costs[1]
    table.at_least("capture over msprobe's dump", Times(ratio, ratio), LEAST_OVER_DUMP, note)
    memory = (capture["anonymous"] - CAPTURE_BUDGET) / 1e6
    table.at_most("MB of a capture over its budget", Times(memory, memory), 200)


def write_sparse(folder: Path, num_bytes: int) -> Path:
    """Write a dump of bfloat16 zeros that takes no room on the disk."""
    folder.mkdir()
    shape = (4096, 4096)
    size = 2 * shape[0] * shape[1]
    for number in range(num_bytes // size):
        entry = {"dtype": "BF16", "shape": shape, "data_offsets": [0, size]}
        header = json.dumps({f"model.layers.{number:04}.mlp.output": entry}).encode()
        header += b" " * (-len(header) % 8)
        with (folder / f"{number:04}.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(file.tell() + size)
    return folder


def test_memory_does_not_grow_with_the_dump(
    tmp_path: Path, table: Table, new_folder: Callable[[], Path]
) -> None:
    peaks = {}
    for gigabytes in (1, 20):
        sides = [
            write_sparse(tmp_path / f"{side}{gigabytes}", gigabytes * 500_000_000)
            for side in ("golden", "mine")
        ]
        peaks[gigabytes] = run("command", *sides, new_folder())["anonymous"]
        assert peaks[gigabytes] <= MOST_ANONYMOUS_BYTES
    note = f"{peaks[1] / 1e6:.0f} MB at 1 GB, {peaks[20] / 1e6:.0f} MB at 20 GB"
    growth = peaks[20] / peaks[1]
    table.at_most("memory of 20 GB over 1 GB", Times(growth, growth), MOST_GROWTH, note)
