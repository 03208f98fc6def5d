"""Sessions that are refused before any case runs."""

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


def test_a_file_that_is_not_there_is_refused_also_where_k_leaves_its_name_out(
    tmp_path: Path,
) -> None:
    missing = tmp_path / "smoke.toml"
    ran: list[object] = []
    options = SessionOptions(extra=(f"command:{missing}",), keyword="one-process-1")

    with pytest.raises(UsageError, match=f"^{missing}: cannot be read: No such file"):
        run_session(options, tmp_path / "run", lambda result, *_: ran.append(result))

    assert ran == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            SessionOptions(("one-process-1",), keyword="fsdp"),
            "nothing to run: -k 'fsdp': no case of one-process-1 matches",
        ),
        (
            SessionOptions(("one-process-1",), precision="bfloat16"),
            "nothing to run: --run cpu/bfloat16: no case of one-process-1 matches",
        ),
        (
            SessionOptions(("mine/good.toml",)),
            "mine/good.toml is not a case; for a library's file write command:mine/good.toml",
        ),
        (SessionOptions(("fsdp-2",), cards=1), "fsdp-2 needs 2 cards, and --cards is 1"),
    ],
)
def test_what_leaves_nothing_or_is_no_case_is_named(
    tmp_path: Path, options: SessionOptions, message: str
) -> None:
    ran: list[object] = []
    with pytest.raises(UsageError) as raised:
        run_session(options, tmp_path / "run", lambda result, *_: ran.append(result))
    assert str(raised.value) == message
    assert ran == []
