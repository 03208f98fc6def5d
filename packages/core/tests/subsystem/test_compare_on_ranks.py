"""`assay compare` on several ranks, with the variables that torchrun sets."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from packages.core.tests.unit.comparison.small_dumps import write

pytestmark = pytest.mark.long

NUM_RANKS = 3

# Every pair of tensors is a share of its own; the rank that a variable names dies in its first one.
RANK = """
import os, signal, sys
from assay.comparison.measuring import pair_measurer
from assay.comparison.measuring.pair_measurer import PairMeasurer
from assay.cli import main

pair_measurer._FEWEST_BYTES = 1
measure = PairMeasurer.measure_pairs

def die(self, pairs):
    if os.environ.get("RANK", "") == os.environ.get("DYING"):
        os.kill(os.getpid(), signal.SIGKILL)
    measure(self, pairs)

PairMeasurer.measure_pairs = die
sys.exit(main())
"""


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("dumps")

    def scale(network: object) -> None:
        network.layers[1].scale = 1.02  # type: ignore[attr-defined]

    return write(folder / "golden"), write(folder / "mine", scale)


def run_ranks(
    dumps: tuple[Path, Path], output: Path, **variables: str
) -> list[tuple[int, str, str]]:
    """Return exit code, output and errors of every rank."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    command = [sys.executable, "-c", RANK, "compare", *map(str, dumps), "--output", str(output)]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **group, **variables, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(NUM_RANKS)
    ]
    ended = [one.communicate(timeout=120) for one in ranks]
    return [(one.returncode, *texts) for one, texts in zip(ranks, ended, strict=True)]


def test_ranks_measure_as_one_process_does(dumps: tuple[Path, Path], tmp_path: Path) -> None:
    alone = [sys.executable, "-m", "assay.cli", "compare", *map(str, dumps)]
    one = subprocess.run([*alone, "--output", str(tmp_path / "one")], check=False)
    ranks = run_ranks(dumps, tmp_path / "three")

    assert [code for code, *_ in ranks] == [one.returncode, 0, 0] == [1, 0, 0], ranks
    assert [bool(printed) for _, printed, _ in ranks] == [True, False, False]
    verdicts = [
        json.loads((tmp_path / name / "verdict.json").read_text()) for name in ("one", "three")
    ]
    assert verdicts[1]["location"] == verdicts[0]["location"]
    assert verdicts[1]["location"]["module"] == "layers.1"
    measured = [(tmp_path / name / "measurements.jsonl").read_bytes() for name in ("one", "three")]
    assert measured[1] == measured[0]


def test_a_rank_that_dies_is_named(dumps: tuple[Path, Path], tmp_path: Path) -> None:
    ranks = run_ranks(dumps, tmp_path / "run", DYING="2")

    assert ranks[2][0] == -signal.SIGKILL
    for code, _, errors in ranks[:2]:
        assert code == 2
        # Ranks that still compute may be named, too.
        assert re.search(
            r"assay: ranks? [-\d, ]*2 of a world of 3 ranks \(rank=3\) did not", errors
        )
    assert not (tmp_path / "run" / "verdict.json").exists()
