"""Captures of DTensors on two ranks: compare puts them together, and names a fault on one rank."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from assay.comparison.check import CompareOptions, compare_dumps
from assay.dumps.recognizing import open_dump
from assay.runs import SilentProgress
from assay.verdicts import Outcome, Verdict

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).with_name("captured_scripts") / "sharded.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captures")
    for launcher in (), TORCHRUN:
        done = subprocess.run(
            [sys.executable, *launcher, str(SCRIPT), str(folder)],
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
    return folder


# As srun starts tasks: without variables of torchrun, and a rank for each from SLURM_PROCID.
_TASK = """
import os, torch
from torch import distributed, nn
rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
distributed.init_process_group("gloo", init_method="file://" + os.environ["STORE"], rank=rank, world_size=size)
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
for _ in range(2):
    model(torch.randn(4, 8) + rank).square().mean().backward()
distributed.destroy_process_group()
"""
_LAUNCHER = """
for rank in 0 1; do
  SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NTASKS=2 "$PYTHON" task.py &
done
wait
"""


def test_the_tasks_of_srun_are_ranks_of_one_trace(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(_TASK, encoding="utf-8")
    words = ("capture", "--output", "trace", "--min-parameters", "0", "--", "bash", "-c", _LAUNCHER)
    variables = {"PYTHON": sys.executable, "STORE": str(tmp_path / "store")}
    done = subprocess.run(
        [sys.executable, "-m", "assay.cli", *words],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240,
        env=os.environ | variables,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "captured trace: rank-0, rank-1" in done.stderr
    contents = open_dump(str(tmp_path / "trace"))
    assert contents.ranks == [0, 1]


def judged(expected: Path, actual: Path) -> Verdict:
    sides = open_dump(str(expected)), open_dump(str(actual))
    return compare_dumps(CompareOptions("a", "b"), *sides, SilentProgress()).verdict


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("batch", "tp"),
        ("requests", "tp"),
        ("steps", "fsdp"),
        ("unclipped", "tp-steps"),
        ("tp", "tp"),
    ],
)
def test_ranks_agree_with_one_process(captures: Path, one: str, other: str) -> None:
    for expected, actual in (one, other), (other, one):
        verdict = judged(captures / expected, captures / actual)
        assert verdict.verdict is Outcome.PASS, (verdict.headline, verdict.unmatched)


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        ("batch", "tp-fault"),
        ("requests", "tp-fault"),
        ("steps", "fsdp-fault"),
        ("unclipped", "tp-steps-fault"),
    ],
)
def test_a_fault_on_one_rank_is_located(captures: Path, expected: str, actual: str) -> None:
    location = judged(captures / expected, captures / actual).location

    assert location is not None
    assert (location.module, location.rank) == ("model.layers.1.mlp.up_proj", 1)


def test_the_layout_of_every_dtensor_is_recorded(captures: Path) -> None:
    layouts = {
        (one.site.at.module, one.site.port): one.layout
        for one in open_dump(str(captures / "tp")).tensors
    }
    mlp = "model.layers.0.mlp"
    assert layouts[f"{mlp}.gate_proj", "output"] == "d0 d1 d2[tp]"
    assert layouts[f"{mlp}.gate_proj", "input.input"] == "d0 d1 d2"

    sharded = open_dump(str(captures / "fsdp")).tensors
    shards = [one for one in sharded if one.site.port.startswith("parameter.")]
    assert {one.layout.partition(" ")[0] for one in shards} == {"d0[mesh-2-0]"}
    assert {(one.site.at.rank, *one.axes.values()) for one in shards} == {(0, (0, 2)), (1, (1, 2))}


def test_statistics_of_shards_are_left_out(captures: Path) -> None:
    dump = open_dump(str(captures / "tp-statistics"))

    assert any("left out statistics of tensors divided over ranks" in one for one in dump.problems)
    ports = {(one.site.at.module, one.site.port) for one in dump.tensors}
    assert ("model.layers.0.mlp.gate_proj", "input.input") in ports
    assert ("model.layers.0.mlp.gate_proj", "output") not in ports
