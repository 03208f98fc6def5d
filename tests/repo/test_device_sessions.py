"""The sessions that run on a device choose the best one, and fail where a promised one is absent."""

import importlib
import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import pytest

LAPTOP = {"cpu": "present", "sim": "present", "card": "absent", "dead": "broken"}
ACCELERATED = {"cpu": "present", "sim": "present", "dead": "broken", "card": "present"}
SESSIONS = ("smoke", "expectations", "check", "bench")


class Aborted(Exception):  # noqa: N818 - as nox says it
    pass


@dataclass
class Session:
    """What the sessions use of nox's."""

    posargs: list[str] = field(default_factory=list)

    def error(self, message: str) -> NoReturn:
        raise Aborted(message)

    def log(self, message: str) -> None:
        pass


@dataclass
class Machine:
    """An environment in which every command succeeds, and only `assay devices` answers."""

    devices: dict[str, str]
    commands: list[list[str]] = field(default_factory=list)
    success_codes: list[list[int]] = field(default_factory=list)

    def read(self, session: Session, *arguments: str) -> str:
        assert arguments[:3] == ("assay.cli", "devices", "--json")
        listed = [{"device": name, "status": status} for name, status in self.devices.items()]
        return json.dumps({"schema": 1, "devices": listed})

    def run(self, session: Session, *arguments: str, success_codes: Any = (0,)) -> None:
        self.commands.append(list(arguments))
        self.success_codes.append(list(success_codes))


@pytest.fixture
def noxfile() -> Any:
    return importlib.import_module("noxfile")


@pytest.fixture(autouse=True)
def promised_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASSAY_REQUIRE_HARDWARE", raising=False)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)


def run_session(
    noxfile: Any,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    devices: dict[str, str],
    *posargs: str,
) -> Machine:
    """Run the session up to where it reads what a command would have written."""
    machine = Machine(devices)
    monkeypatch.setattr(noxfile, "torch_environment", lambda _session, _extent="all": machine)
    with suppress(FileNotFoundError):
        getattr(noxfile, name).func(Session(list(posargs)))
    return machine


@pytest.mark.parametrize(
    ("devices", "expected"), [(LAPTOP, "sim/bfloat16"), (ACCELERATED, "card/bfloat16")]
)
def test_an_accelerator_is_chosen_where_there_is_one(
    noxfile: Any, devices: dict[str, str], expected: str
) -> None:
    listed = [{"device": name, "status": status} for name, status in devices.items()]
    assert noxfile.best_run(listed, "sim/bfloat16") == expected


@pytest.mark.parametrize(
    ("name", "option", "otherwise", "best"),
    [
        ("smoke", "--device", "cpu", "card"),  # the dtype is an axis of its matrix
        ("expectations", "--run", "cpu/float32", "card/bfloat16"),
        ("check", "--candidate", "sim/bfloat16", "card/bfloat16"),
    ],
)
def test_every_command_of_a_session_gets_the_run(
    noxfile: Any,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    option: str,
    otherwise: str,
    best: str,
) -> None:
    for devices, run in ((LAPTOP, otherwise), (ACCELERATED, best)):
        commands = run_session(noxfile, monkeypatch, name, devices).commands
        assert commands
        for command in commands:
            assert command[command.index(option) + 1] == run


def test_what_bench_computes_is_computed_on_the_device(
    noxfile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for devices, run in ((LAPTOP, "cpu/float32"), (ACCELERATED, "card/float32")):
        commands = run_session(noxfile, monkeypatch, "bench", devices).commands
        computing = [command for command in commands if command[2] in ("tune", "run")]
        assert [command[2] for command in computing] == ["tune", "run"]
        for command in computing:
            assert command[command.index("--run") + 1] == run


@pytest.mark.parametrize("name", SESSIONS)
def test_a_promised_accelerator_that_is_absent_is_an_error(
    noxfile: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("ASSAY_REQUIRE_HARDWARE", "1")
    with pytest.raises(Aborted) as raised:
        run_session(noxfile, monkeypatch, name, LAPTOP)
    assert str(raised.value) == (
        "ASSAY_REQUIRE_HARDWARE=1, but no accelerator can be used here; `assay devices` says what"
        " is missing"
    )


@pytest.mark.parametrize("name", SESSIONS)
def test_a_promise_that_may_mean_either_is_an_error(
    noxfile: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("ASSAY_REQUIRE_HARDWARE", "true")
    with pytest.raises(Aborted, match=r"^ASSAY_REQUIRE_HARDWARE is 'true'; it must be 1, 0 or"):
        run_session(noxfile, monkeypatch, name, LAPTOP)


@pytest.mark.parametrize("name", SESSIONS)
def test_a_promise_that_is_kept_is_no_error(
    noxfile: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("ASSAY_REQUIRE_HARDWARE", "1")
    (first, *_) = run_session(noxfile, monkeypatch, name, ACCELERATED).commands
    assert {"card", "card/bfloat16", "card/float32"} & set(first)


@pytest.mark.parametrize(
    ("variables", "codes"),
    [
        ({}, [0, 3]),
        ({"ASSAY_REQUIRE_HARDWARE": "0"}, [0, 3]),
        ({"ASSAY_REQUIRE_HARDWARE": "1"}, [0]),
        ({"ASSAY_REQUIRE_HARDWARE": "0", "GITHUB_ACTIONS": "true"}, [0]),
    ],
)
def test_a_missing_expectation_is_red_where_hardware_was_promised_or_github_asks(
    noxfile: Any, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], codes: list[int]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    machine = run_session(noxfile, monkeypatch, "expectations", ACCELERATED)
    assert machine.success_codes == [codes]


@pytest.mark.parametrize(
    ("name", "posargs"),
    [
        ("smoke", ["--run", "cpu/bfloat16"]),
        ("expectations", ["--run=cpu/bfloat16"]),
        ("check", ["--candidate", "cpu/bfloat16"]),
    ],
)
def test_what_the_caller_gives_goes_before_what_is_found(
    noxfile: Any, monkeypatch: pytest.MonkeyPatch, name: str, posargs: list[str]
) -> None:
    for command in run_session(noxfile, monkeypatch, name, ACCELERATED, *posargs).commands:
        assert "card/bfloat16" not in command
        start = command.index(posargs[0])
        assert command[start : start + len(posargs)] == posargs
