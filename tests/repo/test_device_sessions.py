"""The sessions that run on a device choose the best one, which `assay devices --best` names."""

import importlib
from dataclasses import dataclass, field
from typing import Any

import pytest

from environments import device_sessions


@dataclass
class Session:
    """What the sessions use of nox's."""

    posargs: list[str] = field(default_factory=list)


@dataclass
class Machine:
    """An environment in which every command succeeds, and `assay devices --best` names a device."""

    best: str
    commands: list[list[str]] = field(default_factory=list)
    success_codes: list[list[int]] = field(default_factory=list)

    def read(self, session: Session, *arguments: str) -> str:
        assert arguments[:4] == ("assay.cli", "devices", "--best", "cpu/float32")
        return f"{self.best}\n"

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


def run_session(noxfile: Any, monkeypatch: pytest.MonkeyPatch, name: str, *posargs: str) -> Machine:
    machine = Machine("card/bfloat16")
    for module in (noxfile, device_sessions):
        monkeypatch.setattr(module, "torch_environment", lambda _session, _extent="all": machine)
    getattr(noxfile, name).func(Session(list(posargs)))
    return machine


@pytest.mark.parametrize(
    ("name", "posargs", "option", "best"),
    [
        ("smoke", [], "--device", "card"),  # the dtype is an axis of its matrix
        ("expectations", [], "--run", "card/bfloat16"),
        ("suites", [], "--assay-device", "card/bfloat16"),
        ("recapture", ["micro:llama"], "--run", "card/bfloat16"),
        ("bench", ["run"], "--run", "card/bfloat16"),
    ],
)
def test_the_command_of_a_session_gets_the_best_run(
    noxfile: Any,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    posargs: list[str],
    option: str,
    best: str,
) -> None:
    (command,) = run_session(noxfile, monkeypatch, name, *posargs).commands
    assert command[command.index(option) + 1] == best


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("check", ["assay.cli", "selftest"]),
        ("bench", ["assay.cli", "bench", "selftest"]),
    ],
)
def test_self_tests_choose_the_device_themselves(
    noxfile: Any, monkeypatch: pytest.MonkeyPatch, name: str, command: list[str]
) -> None:
    assert run_session(noxfile, monkeypatch, name).commands == [command]


@pytest.mark.parametrize("name", ["expectations", "bench"])
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
    noxfile: Any,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    variables: dict[str, str],
    codes: list[int],
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert run_session(noxfile, monkeypatch, name).success_codes == [codes]


@pytest.mark.parametrize(
    ("name", "posargs"),
    [
        ("smoke", ["--run", "cpu/bfloat16"]),
        ("bench", ["run", "--run", "cpu/bfloat16"]),
        ("bench", ["compare", "before", "after"]),
        ("expectations", ["--run=cpu/bfloat16"]),
        ("check", ["--candidate", "cpu/bfloat16"]),
    ],
)
def test_what_the_caller_gives_goes_before_what_is_found(
    noxfile: Any, monkeypatch: pytest.MonkeyPatch, name: str, posargs: list[str]
) -> None:
    for command in run_session(noxfile, monkeypatch, name, *posargs).commands:
        assert "card/bfloat16" not in command
        start = command.index(posargs[0])
        assert command[start : start + len(posargs)] == posargs
