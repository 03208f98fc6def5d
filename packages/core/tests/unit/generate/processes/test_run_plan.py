"""How a check fits into its budget."""

from pathlib import Path

import pytest

from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.errors import MachineError
from assay.estimates.speed import Speed
from assay.estimates.trial_call import TrialCall
from assay.generate.processes.golden import capture_golden
from assay.generate.processes.requests import GoldenRequest, InputOptions
from assay.generate.processes.run_plan import BASE_BYTES, _Estimator, plan_run
from assay.runs import SilentProgress

REQUEST = GoldenRequest(
    model="micro:llama?trained=0",
    reference=parse_run("cpu/float32"),
    noise_for=["bfloat16"],
    inputs=InputOptions(max_new_tokens=32),
    folder="",
)


@pytest.fixture(autouse=True)
def probed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """A machine on which a decode step takes the time; the probed dtypes, and those of the weights."""
    probes: list[tuple[str, str | None]] = []

    def probe(_: object, dtype: str, stored: str | None = None) -> Speed:
        probes.append((dtype, stored))
        return Speed(1e-7, 0.0)

    monkeypatch.setattr(Speed, "probe", probe)
    monkeypatch.setattr(TrialCall, "of", lambda model: TrialCall(1e4, 1e7, 0))
    return probes


def seconds_of(num_tokens: int) -> float:
    estimator = _Estimator(REQUEST, open_run(REQUEST.reference), "float64")
    return estimator.of(InputOptions(max_new_tokens=num_tokens)).seconds


def tokens_within(budget: float | None, wanted: int = 32) -> int:
    inputs = InputOptions(max_new_tokens=wanted)
    request = REQUEST.model_copy(update={"max_seconds": budget, "inputs": inputs})
    run = plan_run(request, open_run(request.reference), "float64", SilentProgress())
    return run.inputs.max_new_tokens


def test_tokens_are_halved_until_both_sides_fit() -> None:
    assert seconds_of(32) > 1.5 * seconds_of(16) > 2 * seconds_of(8)

    assert tokens_within(None) == 32
    assert tokens_within(seconds_of(32)) == 32
    assert tokens_within(0.99 * seconds_of(32)) == 16
    assert tokens_within(seconds_of(8)) == 8
    assert tokens_within(seconds_of(2), wanted=3) == 2


def test_shorter_run_is_noted_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, notes = seconds_of(8), []
    monkeypatch.setattr(SilentProgress, "note", lambda _, text: notes.append(text))

    tokens_within(budget)

    assert notes[0] == "--budget: each prompt gets 8 new tokens instead of 32"


def test_budget_that_no_decode_step_fits_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        MachineError, match=r"check of 2 new tokens takes about \d+ s, but --budget allows 2 s"
    ):
        tokens_within(2.0)


def test_weights_that_are_widened_on_use_are_probed_so(
    probed: list[tuple[str, str | None]],
) -> None:
    seconds_of(4)
    assert probed == [("float64", None), ("bfloat16", None), ("bfloat16", None)]
    probed.clear()

    request = REQUEST.model_copy(update={"max_memory": BASE_BYTES})
    with pytest.raises(MachineError, match="needs about"):
        plan_run(request, open_run(REQUEST.reference), "float64", SilentProgress())

    assert probed[0] == ("float64", "bfloat16")


def test_golden_within_a_budget_says_what_is_given_up(tmp_path: Path) -> None:
    update = {"folder": str(tmp_path / "golden"), "max_seconds": seconds_of(4)}
    manifest = capture_golden(REQUEST.model_copy(update=update), SilentProgress())

    assert manifest.inputs.max_new_tokens == 4
    assert "--budget: the last 28 of 32 new tokens of each prompt are not checked" in manifest.notes
