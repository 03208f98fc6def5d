"""The lock of `nox -s locked` sees every change of a verdict or a measurement, and nothing else."""

import json
from dataclasses import dataclass
from pathlib import Path

from assay.runs.results import write_results
from assay.verdicts import Level, Measurement, Outcome, Verdict
from packages.core.tests.locked.__main__ import by_name, compare
from packages.core.tests.trials.kept import Kept


@dataclass(frozen=True)
class Task:
    ratio: float
    note: str
    folder: Path


def judge(task: Task) -> list[Verdict]:
    row = Measurement(
        level="modules", module="lm_head", port="output", statistic="replay-tensor",
        actual=task.ratio, expected=1.0, ratio=task.ratio,
    )  # fmt: skip
    level = Level(verdict=Outcome.PASS, compared=1, ratio=1.0)
    verdict = Verdict(verdict=Outcome.PASS, levels={"modules": level}, notes=[task.note])
    return [write_results(verdict, [row], task.folder)]


def run(folder: Path, ratio: float, note: str) -> dict[str, dict[str, object]]:
    work = folder / "pytest-of-someone" / f"pytest-{note[:1]}" / "work"
    work.mkdir(parents=True)
    Kept(judge, folder / "kept")(Task(ratio, note, work))
    (file,) = (folder / "kept").glob("*.jsonl")
    (line,) = map(json.loads, file.read_text().splitlines())
    assert len(line["measurements"]) == 1
    return by_name(iter([line | {"task": "judge"}]))


def test_a_changed_measurement_is_seen_though_its_verdict_is_equal(tmp_path: Path) -> None:
    old = run(tmp_path / "old", 1.0, "took 3.1 s")
    new = run(tmp_path / "new", 1.0000000000000002, "took 3.1 s")

    (difference,) = compare(old, new)
    assert "measurements[0]" in difference


def test_times_and_folders_are_left_out(tmp_path: Path) -> None:
    old = run(tmp_path / "old", 1.0, f"took 3.1 s in {tmp_path}/pytest-of-me/pytest-3/golden")
    new = run(tmp_path / "new", 1.0, f"took 4 s in {tmp_path}/pytest-of-me/pytest-4/golden")

    assert list(compare(old, new)) == []


def test_another_note_is_seen(tmp_path: Path) -> None:
    old = run(tmp_path / "old", 1.0, "two texts differ")
    new = run(tmp_path / "new", 1.0, "one text differs")

    assert list(compare(old, new)) == [
        "judge\n  .verdicts[0].notes[0]: two texts differ -> one text differs"
    ]


def test_a_result_that_only_one_side_has_is_seen() -> None:
    assert list(compare({"a": {}}, {"b": {}})) == ["not run: a", "not recorded: b"]
    assert len(by_name(iter([{"task": "a"}, {"task": "a"}]))) == 2
