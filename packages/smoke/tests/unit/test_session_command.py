"""What a session is refused for before any of its cases runs."""

from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay_smoke.session.command import SessionOptions, run_session
from assay_smoke.trainers.deepspeed import process


def test_cases_of_a_library_that_is_not_installed_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def find(name: str) -> ModuleSpec | None:
        return None if name == "deepspeed" else find_spec(name)

    monkeypatch.setattr(process, "find_spec", find)
    ran: list[object] = []
    names = ("one-process-1", "zero3-1", "zero1-1")

    with pytest.raises(UsageError) as raised:
        run_session(SessionOptions(names), tmp_path / "run", lambda result, *_: ran.append(result))

    assert str(raised.value) == (
        "zero3-1 and 1 more cannot be run: the trainer deepspeed needs DeepSpeed: pip install"
        " 'assay-smoke[deepspeed]', or leave them out: -k 'not zero'"
    )
    assert ran == []
