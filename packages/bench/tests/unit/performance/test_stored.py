"""Comparing stored results of `assay bench perf`."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay.files import write_whole
from assay.verdicts import Measurement, Verdict
from assay_bench.performance.records import SUITES
from assay_bench.performance.running import (
    compare_sides,
    find_stored,
    read_sides,
)
from packages.bench.tests.unit.performance.sample_results import performance_result


def write_runs(folder: Path, seconds: Sequence[float], **update: object) -> Path:
    for number, one in enumerate(seconds):
        result = performance_result(one, date=f"2026-01-0{number + 1}T00:00:00+00:00")
        result.provenance["host"] = folder.name  # no two runs are equal
        (folder / str(number)).mkdir(parents=True)
        text = result.model_copy(update=update).to_json()
        write_whole(folder / str(number) / "performance.json", text)
    return folder


def compared(
    before: Path, after: Path, suites: Sequence[str] = tuple(SUITES)
) -> tuple[Verdict, list[Measurement]]:
    return compare_sides(
        read_sides(before, after), (before, after), suites=suites, margin=0.05, took_turns=False
    )


@pytest.mark.parametrize(
    ("factor", "outcome"), [(1.5, "FAIL"), (0.9, "PASS"), (1.05, "NOT_COMPARED")]
)
def test_six_runs_of_each_side_decide(factor: float, outcome: str, tmp_path: Path) -> None:
    times = [1.0, 1.01, 1.02, 1.01, 1.0, 1.02]
    before = write_runs(tmp_path / "before", times)
    after = write_runs(tmp_path / "after", [factor * one for one in reversed(times)])
    verdict, rows = compared(before, after)
    assert (verdict.verdict, verdict.compared, len(rows)) == (outcome, 6, 6)
    (numbers,) = (verdict.levels["prefill"].model_extra or {})["measures"]
    assert float(numbers["B to A"]) == pytest.approx(factor, rel=0.01)
    assert numbers["read B to A"] == "1.000"
    assert verdict.notes[0].startswith("A and B ran at different times")


def test_one_run_of_each_side_is_never_a_verdict(tmp_path: Path) -> None:
    before = write_runs(tmp_path / "before", [1.0])
    after = write_runs(tmp_path / "after", [9.0], run="cpu/bfloat16")
    # The folder of the run itself, too.
    verdict, (row,) = compared(before / "0", after)
    assert (verdict.verdict, row.ratio) == ("NOT_COMPARED", 9.0)
    assert str(verdict.candidate["run"]).endswith("after, cpu/float32 and cpu/bfloat16")
    (level,) = verdict.levels.values()
    assert level.reason is not None
    assert level.reason.startswith("underpowered: 1 run of each side; an interval needs")


def test_suite_that_one_side_lacks_is_not_compared(tmp_path: Path) -> None:
    before = write_runs(tmp_path / "before", [1.0] * 6)
    after = write_runs(
        tmp_path / "after", [1.0] * 6, suites=performance_result(1.0, suite="decode").suites
    )
    verdict, rows = compared(before, after)
    assert (verdict.verdict, rows) == ("NOT_COMPARED", [])
    assert {name: level.reason for name, level in verdict.levels.items()} == {
        "prefill": "B: not every run measured it",
        "decode": "A: not every run measured it",
    }
    assert compared(before, after, ["decode"])[0].levels.keys() == {"decode"}


def test_suite_that_neither_side_can_run_is_listed(tmp_path: Path) -> None:
    skipped = {"collectives": "needs 2 devices"}
    before, after = (
        write_runs(tmp_path / name, [1.0] * 6, skipped=skipped) for name in ("before", "after")
    )
    verdict, _ = compared(before, after)
    assert verdict.verdict == "PASS"
    assert verdict.levels["collectives"].reason == "A, B: needs 2 devices"


@pytest.mark.parametrize("name", ["machine", "model"])
def test_another_machine_or_model_is_refused(name: str, tmp_path: Path) -> None:
    before = write_runs(tmp_path / "before", [1.0])
    after = write_runs(tmp_path / "after", [1.0], **{name: "another"})
    with pytest.raises(UsageError, match=f"not comparable, different {name}: .*; another"):
        compared(before, after)


def test_runs_of_one_side_must_be_alike(tmp_path: Path) -> None:
    folder = write_runs(tmp_path / "before", [1.0, 1.0])
    changed = performance_result(1.0).model_copy(update={"versions": {"torch": "2.14.0"}})
    write_whole(folder / "1" / "performance.json", changed.to_json())
    with pytest.raises(UsageError, match="different versions: "):
        read_sides(folder, write_runs(tmp_path / "after", [1.0]))
    assert find_stored(tmp_path / "absent") == []


def test_same_folder_as_both_sides_is_refused(tmp_path: Path) -> None:
    folder = write_runs(tmp_path / "before", [1.0] * 6)
    with pytest.raises(UsageError, match=r"before is both A and B: measure B with `assay bench pe"):
        read_sides(folder, folder / "0" / "..")


@pytest.mark.parametrize("side", ["before", "after"])
def test_copy_of_a_run_is_not_an_independent_process(side: str, tmp_path: Path) -> None:
    before = write_runs(tmp_path / "before", [1.0] * 6)
    after = write_runs(tmp_path / "after", [1.0] * 6)
    shutil.copytree(before / "2", tmp_path / side / "copy")
    with pytest.raises(UsageError) as refused:
        read_sides(before, after)
    assert str(refused.value) == (
        f"{tmp_path / side / 'copy'} is a copy of {before / '2'}, and an interval needs independent processes:"
        " remove it, or measure again with `assay bench perf`"
    )
