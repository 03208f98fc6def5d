"""Modules that are preloaded for the ranks of a case, and its second try."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from assay.launch import TimeLimits, WorldError
from assay.runs import SilentProgress
from assay_smoke.cases.running import EVERY_CASE, CaseRun, mesh_of, preload_for
from assay_smoke.machine import Leftover
from assay_smoke.matrix.rules import case_of

_COUNT_THREADS = """
import importlib, os, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
print(len(os.listdir("/proc/self/task")))
"""


@pytest.mark.parametrize(
    ("case", "mesh"),
    [
        ("one-process-1", {}),  # as in `assay check train` without --mesh
        ("fsdp-2", {"dp": 2}),
        ("tensor-parallel-2", {"tp": 2}),
        ("pipeline-2", {"pp": 2}),
    ],
)
def test_only_a_framework_that_spreads_training_has_a_mesh(case: str, mesh: dict[str, int]) -> None:
    assert mesh_of(case_of(case)) == mesh


@pytest.mark.parametrize(
    ("case", "trainer", "device", "added"),
    [
        ("fsdp-2-lora", "fsdp", "cpu", []),
        ("fsdp-2-compile", "fsdp", "cpu", ["torch._inductor.compile_fx"]),
        ("zero2-2", "deepspeed-zero2", "cpu", ["assay_smoke.cases.preloaded_deepspeed"]),
        # DeepSpeed may open the device in the parent of the forks.
        ("zero2-2", "deepspeed-zero2", "cuda", []),
        ("fsdp-2-compile", "fsdp", "cuda", []),
        # A user's trainer does not need DeepSpeed, which may be absent.
        ("zero2-2", "my_trainer:Trainer", "cpu", []),
    ],
)
def test_only_what_ranks_on_a_host_need_is_preloaded(
    case: str, trainer: str, device: str, added: list[str]
) -> None:
    assert preload_for(case_of(case), trainer, device) == (*EVERY_CASE, *added)


@pytest.mark.skipif(not find_spec("deepspeed"), reason="the extra of this package is not installed")
def test_preloading_starts_no_thread() -> None:
    modules = preload_for(case_of("zero2-2"), "deepspeed-zero2", "cpu")
    compiler = preload_for(case_of("fsdp-2-compile"), "fsdp", "cpu")
    printed = subprocess.run(
        [sys.executable, "-c", _COUNT_THREADS, *modules, *compiler],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert printed.split()[-1] == "1"


def test_a_second_try_begins_without_what_the_first_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def fail(case: CaseRun) -> Path:
        found.append([*case.left_behind])
        case.left_behind.append(Leftover("process", "of the first try"))
        raise WorldError("the machine failed")

    monkeypatch.setattr(CaseRun, "_open_reference", fail)
    limits = TimeLimits(60.0, collective_seconds=30.0, body_seconds=60.0)
    run = CaseRun(case_of("one-process-1"), "cpu", tmp_path, limits=limits).run
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        run(tmp_path / name, SilentProgress())

    assert found == [[], []]
