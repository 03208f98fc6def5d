"""Cut-off runs and repeated calls."""

import json
from pathlib import Path

import pytest
import torch

from assay.offline.contents import find_cut_off
from assay.verdicts import Outcome
from packages.core.tests.unit.offline.memory_dump import make_dump
from packages.core.tests.unit.offline.small_dumps import judge, write

BLOCK = ("layers.0.up", "layers.0.down", "layers.0", "layers.1.up", "layers.1.down", "layers.1")


def ending_with(modules: tuple[str, ...], num_whole: int) -> list[str]:
    """Return the problems of a dump of whole passes and a pass with some modules only."""
    values = {
        (module, "output", step): torch.ones(1, 4, 2)
        for step, held in enumerate([(*BLOCK, "lm_head")] * num_whole + [modules])
        for module in held
    }
    return find_cut_off(make_dump(values))


@pytest.mark.parametrize("num_whole", [0, 2])
def test_a_run_that_ends_within_a_block_was_cut_off(num_whole: int) -> None:
    assert ending_with(BLOCK[:4], num_whole) == [
        f"the run was cut off in step {num_whole}: its last results are those of layers.1.up"
    ]


def test_a_run_that_ends_with_its_pass_is_whole() -> None:
    assert ending_with((*BLOCK, "lm_head"), 0) == ending_with((*BLOCK, "lm_head"), 2) == []


def test_a_module_that_a_later_pass_skips_is_not_a_cut_off() -> None:
    """Skip a module, as an expert that no token chose."""
    assert ending_with((*BLOCK[:3], *BLOCK[4:], "lm_head"), 2) == []


def cut(folder: Path, num_kept: int) -> Path:
    """Leave the first calls in the index."""
    (file,) = folder.rglob("dump.json")
    index = json.loads(file.read_text())
    index["data"] = dict(list(index["data"].items())[:num_kept])
    file.write_text(json.dumps(index))
    return folder


def test_two_runs_that_were_cut_off_alike_do_not_pass(tmp_path: Path) -> None:
    golden, mine = (cut(write(tmp_path / name), 28) for name in ("golden", "mine"))
    verdict = judge(golden, mine, tmp_path / "out")
    assert verdict.verdict is Outcome.NOT_COMPARED
    reason = str(verdict.levels["completeness"].reason)
    assert (
        reason.count("the run was cut off in step 2: its last results are those of layers.1") == 2
    )


def test_a_run_that_was_cut_off_within_a_pass_is_not_compared(tmp_path: Path) -> None:
    verdict = judge(write(tmp_path / "g"), cut(write(tmp_path / "m"), 28), tmp_path / "out")
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert "layers.2.up:output at step 2" in verdict.unmatched.expected
    assert "the run was cut off in step 2" in str(verdict.levels["completeness"].reason)


def double(folder: Path, **changed: object) -> Path:
    """Record the second call of a module twice. changed: fields of the second record."""
    (file,) = folder.rglob("dump.json")
    index = json.loads(file.read_text())
    doubled, later = {}, 0
    for key, call in index["data"].items():
        head, _, number = key.rpartition(".")
        number = int(number)
        own = head == "Module.layers.1.up.Linear.forward"
        doubled[f"{head}.{number + (later if own else 0)}"] = call
        if own and number == 1:
            later = 1
            doubled[f"{head}.2"] = call | changed
    index["data"] = doubled
    file.write_text(json.dumps(index))
    return folder


REPEAT = "{} holds the same values twice in a pass: layers.1.up:output"


def test_a_call_that_both_sides_recorded_twice_is_a_note(tmp_path: Path) -> None:
    golden, mine = double(write(tmp_path / "golden")), double(write(tmp_path / "mine"))
    verdict = judge(golden, mine, tmp_path / "out")
    assert verdict.verdict is Outcome.PASS
    notes = [one for one in verdict.notes if "twice in a pass" in one]
    assert notes == [REPEAT.format("EXPECTED"), REPEAT.format("ACTUAL")]


@pytest.mark.parametrize("side", ["EXPECTED", "ACTUAL"])
def test_a_call_that_one_side_recorded_twice_forbids_a_pass(tmp_path: Path, side: str) -> None:
    golden, mine = write(tmp_path / "golden"), write(tmp_path / "mine")
    double(golden if side == "EXPECTED" else mine)
    verdict = judge(golden, mine, tmp_path / "out")
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert str(verdict.levels["completeness"].reason) == REPEAT.format(side)


def test_an_argument_that_one_side_recorded_twice_is_not_a_repeated_call(tmp_path: Path) -> None:
    golden, mine = write(tmp_path / "golden"), double(write(tmp_path / "mine"), output=[])
    assert judge(golden, mine, tmp_path / "out").verdict is Outcome.PASS


def test_a_warm_up_alone_is_not_compared(tmp_path: Path) -> None:
    golden = write(tmp_path / "golden")
    mine = cut(write(tmp_path / "mine", ids=torch.zeros(1, 8, dtype=torch.long)), 11)
    verdict = judge(golden, mine, tmp_path / "out")
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert "ACTUAL holds only a warm-up: all of its tokens are equal" in verdict.notes
