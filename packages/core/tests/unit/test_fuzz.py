"""A short fuzz of every reader, and readers with planted faults that it has to find."""

import json
import os
import signal
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay.files import read_json_object, read_sealed_json, seal
from packages.core.tests.fuzz import cases
from packages.core.tests.fuzz.commands import problem_with
from packages.core.tests.fuzz.reader import Reader
from packages.core.tests.fuzz.registry import READERS
from packages.core.tests.fuzz.running import fuzz_reader

SEED = 1


# Forking is what the fuzz does; its children start no threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def write(folder: Path) -> None:
    (folder / "a.json").write_text(seal({"a": 1, "b": [1.5, "text"], "c": {"d": None}}))


def read_whole(folder: Path) -> object:
    return read_sealed_json(folder / "a.json")


def read_unchecked(folder: Path) -> object:
    return read_json_object(folder / "a.json").get("b")


def read_by_hand(folder: Path) -> object:
    return json.loads((folder / "a.json").read_text())["c"]["d"]


def read_waiting(folder: Path) -> object:
    if (folder / "a.json").is_dir():
        time.sleep(60)
    return None


def read_quoting(folder: Path) -> object:
    content = read_json_object(folder / "a.json")
    if content.get("a") != 1:
        raise UsageError(f"not the number one:\n{content.get('a')}")
    return None


def read_hungrily(folder: Path) -> object:
    return None if read_json_object(folder / "a.json").get("a") == 1 else len(b"x" * (200 << 20))


def read_crashing(folder: Path) -> object:
    if read_json_object(folder / "a.json").get("a") != 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return None


def read_following(folder: Path) -> object:
    os.system(f"[ ! -d {folder}/a.json ] || touch {folder}/executed")  # noqa: S605 - the fault
    return None


@pytest.mark.parametrize(
    ("read", "finding"),
    [
        (read_unchecked, "another conclusion without an error"),
        (read_by_hand, "JSONDecodeError at "),
        (read_quoting, "its message quotes more than one line of the file"),
        (read_waiting, "hangs: "),
        (read_hungrily, "took 2"),
        (read_crashing, "ended by signal 15"),
        (read_following, "the file ran a command"),
    ],
)
def test_a_planted_fault_is_found(
    read: Callable[[Path], object], finding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "BLOCKED_SECONDS", 1.0)
    monkeypatch.setattr(cases, "LIMIT_BYTES", 100 << 20)
    sample = cases.Sample(Reader("planted", write, read, sealed=True), tmp_path)
    results = cases.run_cases(sample, SEED, range(10_000), time.monotonic() + 60)
    assert any(finding in (result.finding or "") for result in results)


def test_the_files_of_a_finding_are_kept(tmp_path: Path) -> None:
    reader = Reader("planted", write, read_unchecked, sealed=True)
    tally = fuzz_reader(reader, SEED, 10.0, tmp_path, range(60))
    kept = [tmp_path / f"planted-{one.number}" / "sample" for one in tally.findings.values()]
    assert kept
    assert all(folder.is_dir() for folder in kept)


def test_a_reader_without_a_fault_has_no_finding(tmp_path: Path) -> None:
    tally = fuzz_reader(Reader("clean", write, read_whole, sealed=True), SEED, 1.0, tmp_path)
    assert tally.findings == {}
    assert {"error", "same"} <= tally.outcomes.keys()


def test_a_case_is_the_same_whenever_it_is_made(tmp_path: Path) -> None:
    sample = cases.Sample(Reader("clean", write, read_whole), tmp_path / "made")
    told = [sample.mutate(SEED, number, tmp_path / "one" / "sample") for number in range(9)]
    again = [sample.mutate(SEED, number, tmp_path / "other" / "sample") for number in range(9)]
    assert again == told
    assert len(set(told)) > 5


@pytest.mark.parametrize("reader", [one for one in READERS if not one.slow], ids=attrgetter("name"))
def test_a_reader_survives_a_few_mutations(reader: Reader, tmp_path: Path) -> None:
    tally = fuzz_reader(reader, SEED, 30.0, tmp_path, range(2))
    assert tally.findings == {}
    assert sum(tally.outcomes.values()) == 2


@pytest.mark.parametrize(
    ("code", "printed", "problem"),
    [
        (2, "assay: x.json: not JSON\n", None),
        (1, "FAIL\n", None),
        (2, "Traceback (most recent call last):\n", "it prints a traceback"),
        (2, "assay: this is a bug in assay, and no verdict", "it prints a traceback"),
        (-11, "", "it ended with -11"),
        (None, "", "it hangs"),
        (2, "assay: x:\n::error::forged\n", "it prints a line of the file as a command of CI"),
        (2, "assay: \x1b[31m", "it prints the control character '\\x1b'"),
    ],
)
def test_what_a_command_may_not_do(code: int | None, printed: str, problem: str | None) -> None:
    assert problem_with(code, printed) == problem
