"""`assay selftest` needs a clean PASS and a FAIL at the planted place; `best_run` chooses its device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner, Result

from assay.api.verdict import CheckedVerdict
from assay.cli.application import devices, selftest
from assay.devices import detection
from assay.devices.detection import ListedDevice
from assay.errors import MachineError, UsageError
from assay.testing import self_test
from assay.testing.self_test import PLANTED_MODULE, best_run, plant
from packages.core.tests.unit.report.sample_runs import Sample, write_sample

NO_CARD = (ListedDevice("cpu", "present"), ListedDevice("dead", "broken"))
A_CARD = (*NO_CARD, ListedDevice("sim", "present"), ListedDevice("card", "present"))
PASSES = None


@pytest.fixture(autouse=True)
def promised_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASSAY_REQUIRE_HARDWARE", raising=False)


def list_here(monkeypatch: pytest.MonkeyPatch, lines: tuple[ListedDevice, ...]) -> None:
    monkeypatch.setattr(detection, "list_devices", lambda _timeout: lines)


@pytest.mark.parametrize(("lines", "run"), [(NO_CARD, "sim/bfloat16"), (A_CARD, "card/bfloat16")])
def test_an_accelerator_is_chosen_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, lines: tuple[ListedDevice, ...], run: str
) -> None:
    list_here(monkeypatch, lines)
    assert best_run("sim/bfloat16", 1.0) == run
    app = typer.Typer()
    app.command()(devices)
    assert CliRunner().invoke(app, ["--best", "sim/bfloat16"]).stdout == f"{run}\n"


def test_a_promised_accelerator_that_is_absent_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ASSAY_REQUIRE_HARDWARE", "1")
    list_here(monkeypatch, A_CARD)
    assert best_run("cpu/float32", 1.0) == "card/bfloat16"
    list_here(monkeypatch, NO_CARD)
    with pytest.raises(MachineError) as raised:
        best_run("cpu/float32", 1.0)
    assert str(raised.value) == (
        "ASSAY_REQUIRE_HARDWARE=1, but no accelerator can be used here; `assay devices` says what"
        " is missing"
    )


def test_a_promise_that_may_mean_either_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_REQUIRE_HARDWARE", "true")
    with pytest.raises(UsageError, match=r"^ASSAY_REQUIRE_HARDWARE is 'true'; it must be 1, 0 or"):
        best_run("cpu/float32", 1.0)


@pytest.fixture
def asked() -> list[Any]:
    """The candidate and the names of the other options of each check."""
    return []


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: list[Any]) -> Callable[..., Result]:
    """Run the command; each of the two checks fails at the given module, or passes."""

    def run(*faulty_modules: str | None) -> Result:
        faulty = iter(faulty_modules)

        def check(model: str, **options: Any) -> CheckedVerdict:
            asked.append((options.pop("candidate"), sorted(options)))
            sample = Sample(2, 2, 18, 2, next(faulty))
            return CheckedVerdict.publish(write_sample(options["output"], sample))

        monkeypatch.setattr(self_test, "check_generate", check)
        app = typer.Typer()
        app.command()(selftest)
        words = ["--candidate", "cpu/bfloat16", "--output", str(tmp_path / "out")]
        return CliRunner().invoke(app, words)

    return run


def test_a_model_that_passes_and_a_fault_that_is_found_pass(
    run: Callable[..., Result], asked: list[Any]
) -> None:
    result = run(PASSES, PLANTED_MODULE)
    assert result.exit_code == 0
    assert asked == [
        ("cpu/bfloat16", ["max_new_tokens", "output", "reference"]),
        ("cpu/bfloat16", ["candidate_setup", "golden", "max_new_tokens", "output"]),
    ]
    clean, planted = result.stdout.split("Now with a planted fault: this one has to FAIL.\n")
    assert clean.startswith("✓ PASS")
    assert planted.startswith("✗ FAIL")
    assert planted.splitlines()[-1] == (
        "✓ The selftest passes on cpu/bfloat16: the model agrees, and the planted fault was found."
    )


def test_a_fault_that_is_found_elsewhere_fails(run: Callable[..., Result]) -> None:
    result = run(PASSES, "model.layers.0.mlp.down_proj")
    assert result.exit_code == 1
    assert f"is in {PLANTED_MODULE}, and was found at model.layers.0.mlp" in result.stderr


def test_a_fault_that_is_not_found_fails(run: Callable[..., Result]) -> None:
    result = run(PASSES, PASSES)
    assert result.exit_code == 1
    assert "was found at no place" in result.stderr


def test_a_model_that_fails_ends_the_test(run: Callable[..., Result], asked: list[Any]) -> None:
    assert run("model.layers.0.mlp.down_proj", PASSES).exit_code == 1
    assert len(asked) == 1


def test_the_planted_fault_scales_one_weight() -> None:
    model = nn.Module()
    *folders, last = PLANTED_MODULE.split(".")
    inner = model
    for name in folders:
        inner.add_module(name, child := nn.Module())
        inner = child
    inner.add_module(last, linear := nn.Linear(2, 2, bias=False))
    nn.init.ones_(linear.weight)
    plant(model)
    assert torch.equal(linear.weight, torch.full((2, 2), 1.02))
