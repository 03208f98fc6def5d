import json
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread

import pytest

from assay.files import DiskError
from assay.verdicts import Outcome
from assay_smoke.matrix.planning import (
    RUNS_KEPT,
    Durations,
    History,
    RecordedRun,
    estimated_seconds,
    history_file,
    machine_kind,
    read_history,
    record_runs,
)
from assay_smoke.matrix.rules import Case, case_of

FSDP, DDP = case_of("fsdp-2-lora"), case_of("ddp-2")
MACHINE = "cpu-test-2"


def ran(seconds: float, outcome: Outcome = Outcome.PASS) -> RecordedRun:
    return RecordedRun(seconds=seconds, outcome=outcome, time=datetime(2030, 1, 2, tzinfo=UTC))


def recorded(path: Path, *runs: tuple[Case, RecordedRun]) -> Durations:
    record_runs(path, MACHINE, runs)
    return Durations.of(read_history(path), MACHINE)


def test_without_records_a_case_takes_its_estimate(tmp_path: Path) -> None:
    durations = Durations.of(read_history(tmp_path / "none.json"), MACHINE)
    assert not durations.runs_of(FSDP)
    assert durations.expected_seconds(FSDP) == estimated_seconds(FSDP)
    assert durations.history.problem is None


def test_estimates_grow_with_cards_and_compilation() -> None:
    names = ("one-process-1", "ddp-2", "ddp-4", "ddp-4-compile")
    seconds = [estimated_seconds(case_of(name)) for name in names]
    assert seconds == sorted(set(seconds))
    assert seconds[0] > 0


def test_a_recorded_case_takes_the_median_of_its_passing_runs(tmp_path: Path) -> None:
    failed = ran(300, Outcome.FAIL)
    runs = [(FSDP, run) for run in (ran(10), ran(12), failed, ran(50))]
    durations = recorded(tmp_path / "history.json", *runs)
    assert durations.expected_seconds(FSDP) == 12
    assert durations.num_failures(FSDP) == 1
    assert len(durations.runs_of(FSDP)) == 4


def test_a_case_that_never_passed_takes_its_longest_run(tmp_path: Path) -> None:
    runs = [(FSDP, ran(20, Outcome.FAIL)), (FSDP, ran(300, Outcome.NOT_COMPARED))]
    durations = recorded(tmp_path / "history.json", *runs)
    assert durations.expected_seconds(FSDP) == 300
    assert durations.num_failures(FSDP) == 2


def test_a_slow_machine_is_slow_for_cases_that_have_not_run(tmp_path: Path) -> None:
    slow = 3 * estimated_seconds(FSDP)
    durations = recorded(tmp_path / "history.json", (FSDP, ran(slow)))
    assert durations.expected_seconds(DDP) == pytest.approx(3 * estimated_seconds(DDP))


def test_records_of_another_kind_of_machine_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    record_runs(path, "amd", [(FSDP, ran(1))])
    assert not Durations.of(read_history(path), MACHINE).runs_of(FSDP)
    assert Durations.of(read_history(path), "amd").expected_seconds(FSDP) == 1


def test_only_the_last_runs_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "history.json"
    record_runs(path, MACHINE, [(FSDP, ran(100, Outcome.FAIL))])
    durations = recorded(path, *[(FSDP, ran(number)) for number in range(RUNS_KEPT)])
    assert len(durations.runs_of(FSDP)) == RUNS_KEPT
    assert durations.num_failures(FSDP) == 0


def test_sessions_that_record_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    cases = [case_of(f"fsdp-{cards}") for cards in range(2, 22)]
    threads = [Thread(target=record_runs, args=(path, MACHINE, [(c, ran(1))])) for c in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    written = json.loads(path.read_text(encoding="utf-8"))
    assert sorted(written["machines"][MACHINE]) == sorted(case.id for case in cases)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1, "machines": {"cpu": 3}}', "\x00"])
def test_a_damaged_history_is_a_problem_and_no_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "history.json"
    path.write_text(text, encoding="utf-8")
    assert str(read_history(path).problem).startswith(f"not used: {path}: ")
    assert recorded(path, (FSDP, ran(7))).expected_seconds(FSDP) == 7
    assert read_history(path).problem is None


def test_a_history_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(DiskError, match=f"cannot write {tmp_path}/file/history.json"):
        record_runs(tmp_path / "file" / "history.json", MACHINE, [(FSDP, ran(1))])


def test_ids_of_another_version_are_passed_over() -> None:
    history = History(schema=1, machines={MACHINE: {"warp-drive-9": [ran(1)]}})
    assert Durations.of(history, MACHINE).expected_seconds(DDP) == estimated_seconds(DDP)


def test_the_file_is_in_the_cache_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert history_file() == Path("/caches/assay/smoke-history.json")
    # The specification: a relative path is to be ignored.
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    monkeypatch.setenv("HOME", "/home/someone")
    assert history_file() == Path("/home/someone/.cache/assay/smoke-history.json")


def test_a_host_is_known_by_its_instructions_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert machine_kind("cpu") == "cpu-riscv64-16"
    assert machine_kind("amd") == "amd"
