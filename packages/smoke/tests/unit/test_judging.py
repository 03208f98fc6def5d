"""Verdicts over made-up reports; the clean one is the one that every test changes."""

import math
from typing import Any

import pytest

from assay.verdicts import Location, Outcome, Verdict
from assay_smoke.judging import judge_cycle
from assay_smoke.planning import Cycle
from assay_smoke.reports import PartReport, StepRecord

CYCLE = Cycle(
    name="tiny", model="micro:llama", run="cpu/float32", features=["lora"], steps=3, resume_at=2
)
BASE, ADAPTER = "model.base_model.model.lm_head.weight", "model.base_model.model.lora_A.weight"
STATE = {BASE: "b0", ADAPTER: "a2", "optimizer.state.0.step": "2", "generators.torch": "g2"}
START, END = {BASE: "b0", ADAPTER: "a0"}, {BASE: "b0", ADAPTER: "a3"}
STEPS = [
    StepRecord(step=step, loss=loss, num_tokens=7, grad_norm=1.0)
    for step, loss in enumerate((3.0, 2.5, 2.25))
]
UNINTERRUPTED = PartReport(
    steps=STEPS,
    trainable=[ADAPTER],
    at_start=START,
    at_checkpoint=STATE,
    at_end=END,
    adapter_in_memory={ADAPTER: "a2"},
    adapter_on_disk={ADAPTER: "a2"},
)
RESUMED = UNINTERRUPTED.model_copy(
    update={
        "steps": STEPS[2:],
        "adapter_in_memory": {ADAPTER: "a3"},
        "adapter_on_disk": {ADAPTER: "a3"},
    }
)


def judged(
    uninterrupted: dict[str, Any] | None = None, resumed: dict[str, Any] | None = None
) -> Verdict:
    verdict, _ = judge_cycle(
        CYCLE,
        UNINTERRUPTED.model_copy(update=uninterrupted or {}),
        RESUMED.model_copy(update=resumed or {}),
    )
    return verdict


def failed_levels(verdict: Verdict) -> list[str]:
    return [name for name, level in verdict.levels.items() if level.verdict is Outcome.FAIL]


def test_a_clean_cycle_passes() -> None:
    verdict = judged()
    assert verdict.verdict is Outcome.PASS
    assert verdict.diagnosis is None
    # 4 losses; 2 parameters; an adapter of one tensor, saved twice; 4 values of the state; tokens,
    # loss and norm of one step, and 2 parameters at the end.
    assert {name: level.compared for name, level in verdict.levels.items()} == {
        "loss": 4,
        "updates": 2,
        "adapter": 2,
        "checkpoint": 4,
        "resume": 5,
    }
    assert verdict.compared == 17


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_fails_even_if_both_runs_agree(value: float) -> None:
    steps = [STEPS[0], STEPS[1], STEPS[2].model_copy(update={"loss": value})]
    verdict = judged({"steps": steps}, {"steps": steps[2:]})
    assert verdict.verdict is Outcome.FAIL
    assert verdict.diagnosis == "non-finite"
    assert verdict.location == Location(phase="forward", step=2)


@pytest.mark.parametrize(
    ("norm", "compared"), [(math.nan, 4), (math.inf, 5)], ids=["not-observed", "left-out"]
)
def test_a_norm_that_is_not_finite_is_no_failure_where_both_runs_agree(
    norm: float, compared: int
) -> None:
    steps = [step.model_copy(update={"grad_norm": norm}) for step in STEPS]
    verdict = judged({"steps": steps}, {"steps": steps[2:]})
    assert verdict.verdict is Outcome.PASS
    assert verdict.levels["resume"].compared == compared


@pytest.mark.parametrize("side", ["uninterrupted", "resumed"])
def test_a_norm_that_only_one_run_reports_fails(side: str) -> None:
    steps = [step.model_copy(update={"grad_norm": math.nan}) for step in STEPS]
    verdict = judged(**{side: {"steps": steps if side == "uninterrupted" else steps[2:]}})
    assert failed_levels(verdict) == ["resume"]
    assert verdict.levels["resume"].reason == (
        "the gradient norm of step 2 is not the uninterrupted run's"
    )


def test_a_resumed_step_on_another_batch_fails() -> None:
    # Another batch has another loss as well: the random numbers are not to blame.
    step = STEPS[2].model_copy(update={"num_tokens": 8, "loss": 2.0})
    verdict = judged(resumed={"steps": [step]})
    assert failed_levels(verdict) == ["resume"]
    assert verdict.levels["resume"].reason == (
        "the number of tokens of step 2 is not the uninterrupted run's"
    )
    assert verdict.diagnosis == "checkpoint-mismatch"


def test_a_run_that_made_too_few_steps_is_not_a_pass() -> None:
    verdict = judged({"steps": STEPS[:2]})
    assert verdict.levels["loss"].reason == "2 of 3 steps were made"
    assert verdict.verdict is not Outcome.PASS


def test_a_trainable_tensor_that_never_moved_fails() -> None:
    verdict = judged({"at_end": START}, {"at_end": START})
    assert failed_levels(verdict) == ["updates"]
    assert verdict.diagnosis == "frozen-parameters"
    assert verdict.location == Location(phase="optimizer", step=3, parameter="lora_A.weight")
    assert verdict.levels["updates"].reason == (
        "1 of 1 trainable tensors never moved: lora_A.weight"
    )


def test_a_model_with_nothing_to_train_fails() -> None:
    verdict = judged({"trainable": [], "at_end": START}, {"at_end": START})
    assert failed_levels(verdict) == ["updates"]
    assert verdict.levels["updates"].reason == "nothing is trainable"


def test_a_frozen_tensor_that_moved_fails() -> None:
    end = END | {BASE: "b1"}
    verdict = judged({"at_end": end}, {"at_end": end})
    assert failed_levels(verdict) == ["updates"]
    assert verdict.diagnosis == "optimizer-update"
    assert verdict.levels["updates"].reason == "1 frozen tensors moved: lm_head.weight"


@pytest.mark.parametrize(
    ("side", "step"), [("uninterrupted", 2), ("resumed", 3)], ids=["checkpoint", "end"]
)
@pytest.mark.parametrize("on_disk", [{}, {ADAPTER: "x"}], ids=["absent", "other"])
def test_an_adapter_that_is_not_what_was_saved_fails(
    side: str, step: int, on_disk: dict[str, str]
) -> None:
    verdict = judged(**{side: {"adapter_on_disk": on_disk}})
    assert failed_levels(verdict) == ["adapter"]
    assert verdict.diagnosis == "adapter-mismatch"
    assert verdict.location == Location(phase="checkpoint", step=step, parameter="lora_A.weight")


def test_a_model_without_an_adapter_fails_where_one_is_trained() -> None:
    none: dict[str, Any] = {"adapter_in_memory": {}, "adapter_on_disk": {}}
    verdict = judged(none, none)
    assert failed_levels(verdict) == ["adapter"]


def test_without_lora_there_is_no_adapter_to_judge() -> None:
    cycle = CYCLE.model_copy(update={"features": []})
    none: dict[str, Any] = {"adapter_in_memory": {}, "adapter_on_disk": {}}
    verdict, _ = judge_cycle(
        cycle, UNINTERRUPTED.model_copy(update=none), RESUMED.model_copy(update=none)
    )
    assert verdict.verdict is Outcome.PASS
    assert verdict.levels["adapter"].verdict is None


@pytest.mark.parametrize(
    ("path", "diagnosis", "parameter"),
    [
        (BASE, "checkpoint-mismatch", "lm_head.weight"),
        ("optimizer.state.0.step", "checkpoint-mismatch", "optimizer.state.0.step"),
        ("generators.torch", "rng-state", "generators.torch"),
    ],
)
@pytest.mark.parametrize("change", ["lost", "changed"])
def test_a_state_that_comes_back_otherwise_fails(
    path: str, diagnosis: str, parameter: str, change: str
) -> None:
    state = STATE | {path: "x"}
    if change == "lost":
        del state[path]
    verdict = judged(resumed={"at_checkpoint": state})
    assert failed_levels(verdict) == ["checkpoint"]
    assert verdict.diagnosis == diagnosis
    assert verdict.location == Location(phase="checkpoint", step=2, parameter=parameter)
    assert verdict.unmatched.expected == ([path] if change == "lost" else [])


def test_a_checkpoint_that_does_not_load_fails_with_the_reason() -> None:
    verdict, _ = judge_cycle(CYCLE, UNINTERRUPTED, PartReport(problem="the file is cut short"))
    assert failed_levels(verdict) == ["checkpoint"]
    assert verdict.levels["checkpoint"].reason == "the file is cut short"
    assert verdict.levels["resume"].verdict is None
    assert verdict.diagnosis == "checkpoint-mismatch"


def test_a_trainer_without_state_is_not_a_pass() -> None:
    verdict = judged({"at_checkpoint": {}}, {"at_checkpoint": {}})
    assert verdict.verdict is Outcome.NOT_COMPARED


@pytest.mark.parametrize(
    ("field", "diagnosis", "port"),
    [("loss", "rng-state", "loss"), ("grad_norm", "checkpoint-mismatch", "gradient norm")],
)
def test_one_bit_of_a_resumed_step_fails(field: str, diagnosis: str, port: str) -> None:
    step = STEPS[2].model_copy(update={field: math.nextafter(getattr(STEPS[2], field), 9)})
    verdict = judged(resumed={"steps": [step]})
    assert failed_levels(verdict) == ["resume"]
    assert verdict.levels["resume"].reason == f"the {port} of step 2 is not the uninterrupted run's"
    assert verdict.diagnosis == diagnosis


def test_another_number_of_resumed_steps_fails() -> None:
    verdict = judged(resumed={"steps": [*STEPS[1:]]})
    assert failed_levels(verdict) == ["resume"]
    assert verdict.levels["resume"].reason == "2 steps were made instead of 1"


def test_parameters_that_end_elsewhere_fail() -> None:
    verdict = judged(resumed={"at_end": END | {ADAPTER: "x"}})
    assert failed_levels(verdict) == ["resume"]
    assert verdict.levels["resume"].reason == "1 parameters end elsewhere: lora_A.weight"
