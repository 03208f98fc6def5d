import sqlite3
from pathlib import Path

import pytest

from assay.errors import MachineError
from assay_bench.performance.history import database
from assay_bench.performance.history.database import HistoryError, add_results, read_series
from packages.bench.tests.unit.performance.measured import performance_result

DAYS = [f"2026-01-0{day}T00:00:00+00:00" for day in (1, 2, 3)]


def test_runs_come_back_by_date_whatever_the_order_they_were_added_in(tmp_path: Path) -> None:
    file = tmp_path / "history.db"
    first, second, third = (performance_result(n + 2.0, day) for n, day in enumerate(DAYS))
    add_results(file, {Path("b"): second})
    add_results(file, {Path("c"): third, Path("a"): first})
    (series,) = read_series(file)
    assert series.key.suite == "prefill"
    assert series.key.place == "micro:llama on cpu/float32, a processor (2 processors)"
    assert series.ratios == [2.0, 3.0, 4.0]
    assert [point.date for point in series.points] == DAYS
    assert series.points[0].software == "torch 2.13.0, commit 0123456789ab"


def test_machines_models_and_suites_are_series_of_their_own(tmp_path: Path) -> None:
    one = performance_result()
    others = [
        one.model_copy(update={"machine": "another"}),
        one.model_copy(update={"model": "micro:qwen3"}),
        one.model_copy(update={"run": "cpu/bfloat16"}),
        performance_result(suite="decode"),
    ]
    add_results(tmp_path / "h.db", {Path(f"{n}"): r for n, r in enumerate([one, *others])})
    assert [len(series.points) for series in read_series(tmp_path / "h.db")] == [1] * 5


def test_a_run_is_added_once_and_then_none_of_its_call(tmp_path: Path) -> None:
    file = tmp_path / "history.db"
    add_results(file, {Path("run"): performance_result()})
    with pytest.raises(HistoryError, match=f"^again is in {file} already$"):
        add_results(
            file, {Path("new"): performance_result(9.0), Path("again"): performance_result()}
        )
    assert [len(series.points) for series in read_series(file)] == [1]


def test_what_is_no_history_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("not a database, and longer than the header of one is")
    with sqlite3.connect(tmp_path / "other.db") as other:
        other.execute("CREATE TABLE runs (id INTEGER)")
    problems = {
        "absent.db": "there is no such file",
        "text.db": "file is not a database",
        "other.db": "a database of something else",
    }
    for name, problem in problems.items():
        with pytest.raises(HistoryError, match=f"{name} is no history of .*: {problem}"):
            read_series(tmp_path / name)
    for name in ("text.db", "other.db"):
        with pytest.raises(HistoryError, match=problems[name]):
            add_results(tmp_path / name, {Path("run"): performance_result()})


def test_a_folder_that_is_not_there_is_an_error_of_the_machine(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"cannot write .*unable to open database file"):
        add_results(tmp_path / "absent" / "h.db", {Path("run"): performance_result()})


@pytest.mark.parametrize("column", ["document", "digest"])
def test_a_changed_run_is_refused(tmp_path: Path, column: str) -> None:
    file = tmp_path / "history.db"
    add_results(file, {Path("run"): performance_result()})
    with sqlite3.connect(file) as connection:
        connection.execute(f"UPDATE runs SET {column} = replace({column}, '0', '1')")  # noqa: S608
    with pytest.raises(HistoryError, match=r"history\.db: run 1 was changed after it was added"):
        read_series(file)


def test_a_full_disk_leaves_no_history_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "history.db"
    monkeypatch.setattr(database, "_SCHEMA", "CREATE TABLE runs (id INTEGER); no statement")
    with pytest.raises(MachineError, match=r"cannot write .*history\.db"):
        add_results(file, {Path("run"): performance_result()})
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    add_results(file, {Path("run"): performance_result()})
    assert len(read_series(file)) == 1
