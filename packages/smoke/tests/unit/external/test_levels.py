"""Checkpoints of a cycle: absent, broken, repeated, surplus and old ones; memory of its device."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from assay.judge.levels import LevelResult, not_run, passed
from assay.runs import SilentProgress
from assay.verdicts import Outcome
from assay_smoke.external import levels
from assay_smoke.external.levels import (
    _notes_on,
    describe_unjudged,
    judge_checkpoints,
    judge_first_save,
    judge_learning_rates,
    judge_losses,
    judge_memory,
    judge_updates,
)
from assay_smoke.external.runs import Cycle, SavedModel
from assay_smoke.external.watched_run import LoggedStep, Run
from assay_smoke.judging import failed_checkpoint
from assay_smoke.machine import MemoryUse

FIRST, SECOND = SavedModel(1, {"a": "11"}), SavedModel(2, {"a": "22"})
EMPTIED = SavedModel(2, {"a": "22"}, zero=("a",))


def judge(*saved: SavedModel, start: SavedModel | None = None, **facts: Any) -> str | None:
    """Return why checkpoints are wrong; None for a PASS. Those of steps 1 and 2 are expected."""
    cycle: Any = SimpleNamespace(
        library=SimpleNamespace(kept_steps=[1, 2], saved_steps=[1, 2, 3]),
        saved={one.step: one for one in saved},
        start=start,
        changed_files=[],
        narrowing="checkpoints are narrow",
    )
    vars(cycle).update(facts)
    level = judge_checkpoints(cycle).level
    assert level.compared == sum(len(one.hashes) for one in saved)
    if level.verdict is Outcome.FAIL:
        return level.reason
    assert (level.verdict, level.reason) == (Outcome.PASS, "checkpoints are narrow")
    return None


def test_whole_and_distinct_checkpoints_pass() -> None:
    assert judge(FIRST, SECOND) is None
    assert judge(FIRST, SECOND, start=SavedModel(0, {"a": "00"})) is None


def test_values_become_zero_only_if_the_model_starts_with_others() -> None:
    reason = "the checkpoint of step 2 holds only zeros in a"
    assert judge(FIRST, EMPTIED, start=SavedModel(0, {"a": "00"})) == reason
    assert judge(FIRST, EMPTIED, start=SavedModel(0, {"a": "00"}, zero=("a",))) is None
    assert judge(FIRST, EMPTIED) is None  # an adapter starts at random


@pytest.mark.parametrize(
    ("saved", "reason"),
    [
        (
            [FIRST],
            "the checkpoint of step 2 is absent: expected steps 1, 2, found steps 1",
        ),
        ([FIRST, SavedModel(2, problem="cut off")], "the checkpoint of step 2: cut off"),
        ([FIRST, SavedModel(2)], "the checkpoint of step 2: it holds no tensor"),
        (
            [FIRST, SavedModel(2, {"a": "22"}, not_finite=("a",))],
            "the checkpoint of step 2 is not finite: a",
        ),
        (
            [FIRST, SavedModel(2, FIRST.hashes)],
            "the checkpoint of step 2 repeats the tensors of step 1",
        ),
        (
            [FIRST, SECOND, SavedModel(3, {"a": "33"})],
            "3 checkpoints are kept instead of 2: step 3 still has one",
        ),
        (
            [FIRST, SECOND, SavedModel(4, {"a": "44"})],
            "there is an unexpected checkpoint of step 4",
        ),
    ],
)
def test_a_wrong_checkpoint_fails_with_its_step(saved: list[SavedModel], reason: str) -> None:
    assert judge(*saved) == reason


def test_a_run_that_changes_the_initial_model_fails() -> None:
    reason = "files in the folder of {model} changed: config.json"
    assert judge(FIRST, SECOND, changed_files=["config.json"]) == reason


@pytest.mark.parametrize(
    ("zero", "reason"),
    [
        (["a.lora_B", "b.lora_B"], "2 of 2 lora_B are zero: they do not train, or are not saved: a.lora_B, b.lora_B"),
        (["b.lora_B"], "1 of 2 lora_B are zero: they do not train, or are not saved: b.lora_B"),
        ([], "from step 0 to step 2, no element of any tensor grew: weight decay alone moves them, and all gradients are zero"),
    ],
)  # fmt: skip
def test_an_adapter_whose_second_matrices_are_zero_does_not_train(
    zero: list[str], reason: str
) -> None:
    hashes = dict.fromkeys(("a.lora_A", "a.lora_B", "b.lora_A", "b.lora_B"), "11")
    last = SavedModel(2, hashes, zero=tuple(zero), only_shrunk=True)
    cycle: Any = SimpleNamespace(
        library=SimpleNamespace(steps=2, checkpoints=SimpleNamespace(kind="adapter")),
        uninterrupted=SimpleNamespace(values=[2.5, 2.25]),
        saved={2: last},
        last=last,
    )
    level = judge_updates(cycle).level
    assert (level.verdict, level.reason) == (Outcome.FAIL, reason)


@pytest.mark.parametrize("has_steps", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_of_each_rank_is_suspected_where_there_are_ranks(
    ranks: int, *, has_steps: bool
) -> None:
    library: Any = SimpleNamespace(ranks=ranks, steps=3)
    run = Run("uninterrupted", library, Path(), Path(), Path())
    pairs = [(step, loss + step) for step in (1, 2, 3) for loss in (0.25, 0.5)]
    run.losses = [LoggedStep(step if has_steps else None, loss) for step, loss in pairs]
    level = judge_losses(Cycle(run, SilentProgress(), {"uninterrupted": run})).level
    words = "logs step 1 where 2 is expected" if has_steps else "logs 6 losses for 3 steps"
    hint = "; of several ranks, let only one print, and log the mean loss" if ranks > 1 else ""
    assert level.verdict is Outcome.FAIL
    assert level.reason == f"the uninterrupted run {words}{hint}"


PRECISION, RATE = "`precision`", "a positive rate of step {} in `learning_rates`"
MISSING = "skips it. Missing: "
RATE_1 = MISSING + RATE.format(1)
BOTH = f"{MISSING}{PRECISION} and {RATE.format(1)}"


RESUMED = passed(1)
OLD = failed_checkpoint(4, 1, "the first loss differs")
STATE = failed_checkpoint(4, 1, "a later loss differs", diagnosis="checkpoint-mismatch")
UNLESS = "saved models are one step old, unless the log shows the rate of the next step"


@pytest.mark.parametrize(
    ("precision", "rates", "declared", "verdict", "end"),
    [
        ("float32", [5e-4, 1e-3], [5e-4, 1e-3], Outcome.FAIL, "rate is 0.0005: saved models are one step old"),
        ("float32", [5e-4, 1e-3], [0.0, 1e-3], Outcome.NOT_COMPARED, RATE_1),
        (None, [5e-4, 1e-3], [5e-4, 1e-3], Outcome.NOT_COMPARED, MISSING + PRECISION),
        ("float32", [2e-3, 1e-3], None, Outcome.FAIL, "rate is 0.002: saved models are one step old"),
        ("float32", [0.0, 1e-3], None, Outcome.FAIL, "rate is 0.001: saved models are one step old"),
        ("float32", [1e-3, 1e-3], None, Outcome.NOT_COMPARED, RATE_1),
        ("float32", [1e-3, 2e-3], None, Outcome.NOT_COMPARED, RATE_1),
        ("float32", [1e-3, 0.0], None, Outcome.NOT_COMPARED, RATE_1),
        ("float32", [None, None], None, Outcome.NOT_COMPARED, RATE_1),
        (None, [2e-3, 1e-3], None, Outcome.NOT_COMPARED, MISSING + PRECISION),
        (None, [1e-3, 1e-3], None, Outcome.NOT_COMPARED, BOTH),
    ],
)  # fmt: skip
@pytest.mark.parametrize("resumed", [None, RESUMED, STATE])
def test_an_old_model_fails_or_says_what_is_missing(
    resumed: LevelResult | None,
    precision: str | None,
    rates: list[float | None],
    declared: list[float] | None,
    verdict: Outcome,
    end: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short = SimpleNamespace(
        exit_code=0, hung_in=None, losses=[SimpleNamespace(learning_rate=one) for one in rates]
    )
    cycle: Any = SimpleNamespace(
        library=SimpleNamespace(
            launch=["{steps}", "{save_every}"],
            precision=precision,
            learning_rates=declared,
            model_copy=lambda **_: None,
        ),
        run=lambda *_, **__: short,
        start=FIRST,
    )
    monkeypatch.setattr(levels, "checkpoints_of", lambda _: {1: None, 2: None})
    monkeypatch.setattr(levels, "read_history", lambda *_: iter([FIRST]))
    level = judge_first_save(cycle, resumed).level
    assert level.verdict is verdict
    assert str(level.reason).endswith(end)
    if declared is None and precision and rates[0]:  # any logged rate counts
        level = judge_first_save(cycle, OLD).level
        assert level.verdict is Outcome.FAIL
        is_falling = verdict is Outcome.FAIL
        assert str(level.reason).endswith(end if is_falling else f"is {rates[0]:g}: {UNLESS}")


@pytest.mark.parametrize(("ended_well", "verdict"), [(False, Outcome.NOT_COMPARED), (True, None)])
def test_a_crash_of_the_short_run_is_no_pass(
    ended_well: bool, verdict: Outcome | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = SimpleNamespace(
        exit_code=0 if ended_well else 3,
        made_all_steps=False,
        hung_in=None,
        describe_bad_end=lambda: None if ended_well else "it exited with code 3",
    )
    library = SimpleNamespace(launch=["{steps}", "{save_every}"], model_copy=lambda **_: None)
    cycle: Any = SimpleNamespace(library=library, run=lambda *_, **__: short)
    monkeypatch.setattr(levels, "checkpoints_of", lambda _: {})
    level = judge_first_save(cycle).level
    assert level.verdict is verdict
    assert ("exited with code 3" in str(level.reason)) is not ended_well


@pytest.mark.parametrize(
    ("first_step", "rate", "diagnosis", "cause"),
    [
        (0, 2.5, None, ""),
        (0, 2.0, None, ", and step 2 has that rate: the schedule must advance once per step"),
        (1, 2.5, "checkpoint-mismatch", " (a resume must restore the schedule, and the optimizer, which holds the rate)"),
    ],
)  # fmt: skip
def test_a_wrong_rate_of_a_resumed_run_is_lost_state(
    first_step: int, rate: float, diagnosis: str | None, cause: str
) -> None:
    def made(name: str, first: int, rates: list[float]) -> SimpleNamespace:
        losses = [SimpleNamespace(learning_rate=rate) for rate in rates]
        return SimpleNamespace(name=name, first_step=first, losses=losses)

    whole, other = made("uninterrupted", 0, [3.0, 2.0]), made("other", first_step, [rate])
    cycle: Any = SimpleNamespace(
        library=SimpleNamespace(learning_rates=None), uninterrupted=whole, runs=[whole, other]
    )
    result = judge_learning_rates(cycle)
    found: Any = result.cause
    step = first_step + 1
    assert result.level.reason == (
        f"the learning rate of step {step} of the other run is {rate:g}, in the uninterrupted run {3 - first_step:g}{cause}"
    )
    assert (found.diagnosis, found.location.step) == (diagnosis, step)


SHIFTED = "; that is the rate of step {}, as if the checkpoint held the state of one step {}"
LOST = " (a resume must restore the schedule, and the optimizer, which holds the rate)"


@pytest.mark.parametrize(
    ("first_step", "rates", "words"),
    [
        (6, [1.4e-3, 1.2e-3, 1e-3], SHIFTED.format(6, "earlier")),
        (6, [1e-3, 8e-4, 0.0], SHIFTED.format(8, "later")),
        (6, [1.4e-3, 1e-3, 1e-3], LOST),
        (8, [1e-3, 0.0], ", and all later steps have their own rates"),
        (6, [1.4e-3, 1e-3, 8e-4], ", and all later steps have their own rates"),
        (6, [2.4e-3, 2.2e-3, 2e-3], LOST),
        (1, [2.4e-3, 2.2e-3], LOST),  # a schedule that starts again
        (0, [2.2e-3, 2.2e-3, 2e-3], ", and all later steps have their own rates"),
        (0, [2.2e-3, 1.8e-3], ", and step 2 has that rate: the schedule must advance once per step"),
    ],
)  # fmt: skip
def test_a_wrong_rate_is_explained_by_all_later_ones(
    first_step: int, rates: list[float], words: str
) -> None:
    def made(name: str, first: int, rates: list[float]) -> SimpleNamespace:
        losses = [SimpleNamespace(learning_rate=rate) for rate in rates]
        return SimpleNamespace(name=name, first_step=first, losses=losses)

    whole = made("uninterrupted", 0, [*(2.4e-3 - 2e-4 * number for number in range(9)), 0.0])
    cycle: Any = SimpleNamespace(
        library=SimpleNamespace(learning_rates=None),
        uninterrupted=whole,
        runs=[whole, made("other", first_step, rates)],
    )
    assert str(judge_learning_rates(cycle).level.reason).endswith(words)


def test_the_schedule_is_judged_only_if_each_command_declares_its_rates() -> None:
    declared: Any = SimpleNamespace(learning_rates=[1.0])
    undeclared: Any = SimpleNamespace(learning_rates=None)
    assert "schedule" not in describe_unjudged([declared])
    assert "rows that every run drops" in describe_unjudged([declared])
    assert "`assay smoke data` judges labels and (--sampler) rows" in describe_unjudged([declared])
    assert (
        "the schedule (without `learning_rates`), the applied learning rate (at most"
        in describe_unjudged([declared, undeclared])
    )


def test_notes_tell_what_a_pass_left_open() -> None:
    run = SimpleNamespace(name="run", host=MemoryUse(0, 1, 0), on_device=None)
    cycle: Any = SimpleNamespace(
        runs=[run], spreads={}, library=SimpleNamespace(learning_rates=None)
    )
    found = {
        "checkpoint": passed(1, reason="checkpoints are narrow"),
        "updates": passed(1),
        "equivalent": not_run("no other split", unchecked=True),
        "memory": not_run("the library trains on the host"),
    }
    notes = [*_notes_on(cycle, found)]
    assert notes[:2] == ["checkpoint: checkpoints are narrow", "equivalent: no other split"]
    assert notes[2].startswith("host memory of the run run: ")


MIB = 1 << 20


def judge_uses(
    device: str, *uses: tuple[int, int] | None, torch_device: str = "acme"
) -> tuple[Outcome | None, str | None]:
    """Judge runs by the peak and the rest of their device memory in MiB; None is not measured."""
    on_device = [None if use is None else MemoryUse(0, use[0] * MIB, use[1] * MIB) for use in uses]
    cycle: Any = SimpleNamespace(
        library=SimpleNamespace(device=device),
        uninterrupted=SimpleNamespace(
            device=SimpleNamespace(name=device, torch_device=torch_device)
        ),
        runs=[
            SimpleNamespace(name="run", host=MemoryUse(0, 1, 0), on_device=one)
            for one in on_device
        ],
    )  # fmt: skip
    level = judge_memory(cycle).level
    return level.verdict, level.reason


def test_a_library_that_uses_and_releases_its_device_passes() -> None:
    assert judge_uses("acme", (400, 3), (300, 64)) == (Outcome.PASS, None)


def test_a_library_that_never_uses_its_device_fails() -> None:
    reason = "the runs used 3.1 MB of acme: the library trains elsewhere"
    assert judge_uses("acme", (3, 0), (0, 0)) == (Outcome.FAIL, reason)


def test_memory_that_is_not_released_fails() -> None:
    verdict, reason = judge_uses("acme", (400, 65))
    assert (verdict, reason) == (
        Outcome.FAIL, "device memory of the run run: peak 419.4 MB, 68.2 MB not released",
    )  # fmt: skip


def test_the_device_of_a_library_is_not_assumed() -> None:
    verdict, reason = judge_uses("acme", None)
    assert verdict is None
    assert "not checked whether the library trains on acme" in str(reason)
    verdict, reason = judge_uses("sim", None, torch_device="cpu")
    assert verdict is Outcome.NOT_COMPARED
    assert judge_uses("cpu", None, torch_device="cpu") == (None, "the library trains on the host")


def test_a_frozen_tensor_that_moves_is_named_next_to_a_trained_one_that_does_not() -> None:
    before, after = (
        {"embed": "1", "head": "2", "norm": "3"},
        {"embed": "9", "head": "2", "norm": "4"},
    )
    cycle: Any = SimpleNamespace(
        library=SimpleNamespace(
            frozen=["embed"], steps=2, checkpoints=SimpleNamespace(kind="hugging-face")
        ),
        uninterrupted=SimpleNamespace(values=[2.0, 1.0]),
        saved={2: SavedModel(2, after)},
        last=SavedModel(2, after),
        start=SavedModel(0, before),
    )

    found = judge_updates(cycle)

    assert found.level.reason == (
        "1 of 2 tensors outside of `frozen` never moved: head; 1 of 1 frozen tensors moved: embed"
    )
    assert found.cause is not None
    assert found.cause.diagnosis == "frozen-parameters"
