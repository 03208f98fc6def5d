"""Items run side by side on disjoint devices, or alone on all of them, the largest first."""

import time
from functools import partial
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest

from assay.launch import RemoteFunction
from assay.runs import SilentProgress
from assay.runs.results import write_results
from assay.verdicts import Outcome, Verdict
from assay_smoke.external.levels import run_external
from assay_smoke.session import command
from assay_smoke.session.command import CaseResult, SessionItem, run_items

HERE = Path(__file__).parent
VISIBLE = "TEST_VISIBLE_DEVICES"


def device_of(count: int) -> Any:
    vendor = SimpleNamespace(visible_devices=VISIBLE)
    return SimpleNamespace(count=lambda: count, vendor=vendor)


DEVICES = device_of(2)


def _pass(folder: Path, progress: object) -> Verdict:
    return write_results(Verdict(verdict=Outcome.PASS), [], folder)


NEVER_CALLED = partial(run_external, Path())


@pytest.fixture(autouse=True)
def _own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_RUN_ITEM", RemoteFunction("beside_work:run_item"))
    monkeypatch.syspath_prepend(HERE)


def test_each_has_its_devices_and_results_come_as_they_are_there(tmp_path: Path) -> None:
    items = [
        SessionItem(name, "", NEVER_CALLED, num_cards)
        for name, num_cards in (("left", 1), ("right", 1), ("library", None), ("pair", 2))
    ]

    results = list(run_items(items, DEVICES, tmp_path, SilentProgress()))

    found = {result.name: result.reason for result in results}
    assert found == {
        "left": "0 together",
        "right": "1 together",
        "library": "0,1 alone",
        "pair": "0,1 alone",
    }
    assert [one.name for one in results[:2]] == ["library", "pair"]  # the largest begin first
    assert len(results) == 4


def test_a_process_that_is_killed_is_a_failure_of_its_own_case(tmp_path: Path) -> None:
    items = [SessionItem(name, "", NEVER_CALLED, 2) for name in ("killed", "pair")]

    killed, pair = run_items(items, DEVICES, tmp_path, SilentProgress())

    assert (killed.name, killed.outcome, killed.folder) == ("killed", "FAIL", "cases/killed")
    assert "SIGKILL" in str(killed.reason)
    assert (pair.name, pair.outcome) == ("pair", "PASS")


@pytest.mark.parametrize("device", [DEVICES, None])
def test_after_its_budget_a_session_starts_nothing_more(device: Any, tmp_path: Path) -> None:
    items = [SessionItem(name, "", _pass, 2) for name in ("first", "second")]
    results = list(run_items(items, device, tmp_path, SilentProgress(), budget_seconds=0.0))
    assert [result.name for result in results] == ["first"]


@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
def test_every_item_runs_once_on_devices_of_its_own(
    num_devices: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_use, lock = set[str](), Lock()

    def run(item: SessionItem, visible: dict[str, str], *_: object) -> CaseResult:
        own = set(visible[VISIBLE].split(","))
        assert len(own) == min(item.num_cards or 0, num_devices)
        assert own <= set(map(str, range(num_devices)))
        with lock:
            assert in_use.isdisjoint(own)
            in_use.update(own)
        time.sleep(0.001)
        with lock:
            in_use.difference_update(own)
        return CaseResult(name=item.name, outcome=Outcome.PASS, seconds=0.0)

    monkeypatch.setattr(command, "_run_beside", run)
    items = [SessionItem(str(n), "", _pass, 1 + n % 4) for n in range(20)]
    results = run_items(items, device_of(num_devices), tmp_path, SilentProgress())
    assert sorted(result.name for result in results) == sorted(item.name for item in items)
