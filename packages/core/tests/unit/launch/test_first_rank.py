"""Work of the first rank: here without torchrun; with it, in the suite of decoders."""

import pytest

from assay.errors import UsageError
from assay.launch import leave_together, on_first_rank, require_one_machine

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def test_without_torchrun_the_process_does_it_itself() -> None:
    assert on_first_rank(lambda: 7) == 7
    with pytest.raises(ValueError, match="no"):
        on_first_rank(lambda: int("no"))


def test_ranks_on_several_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    require_one_machine()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="started 4 ranks on several machines"):
        require_one_machine()


def test_nobody_is_waited_for_where_no_work_was_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    stores: list[int] = []
    monkeypatch.setattr("assay.launch.process_group.outer_store", lambda: stores.append(1))
    leave_together()
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    leave_together()
    assert stores == []
