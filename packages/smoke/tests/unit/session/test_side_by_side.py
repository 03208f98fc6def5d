"""Items run side by side on disjoint devices, or alone on all of them."""

from functools import partial
from pathlib import Path

import pytest

from assay.runs import RemoteFunction, SilentProgress
from assay_smoke.external.cycle import run_external
from assay_smoke.session import side_by_side
from assay_smoke.session.items import SessionItem
from assay_smoke.session.side_by_side import Devices, run_items

HERE = Path(__file__).parent
DEVICES = Devices(2, "TEST_VISIBLE_DEVICES")
NEVER_CALLED = partial(run_external, Path())


@pytest.fixture(autouse=True)
def _own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "_RUN_ITEM", RemoteFunction("beside_work:run_item"))
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

    assert (killed.name, killed.outcome.value, killed.folder) == ("killed", "FAIL", "cases/killed")
    assert "SIGKILL" in str(killed.reason)
    assert (pair.name, pair.outcome.value) == ("pair", "PASS")
