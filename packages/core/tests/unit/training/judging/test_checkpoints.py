"""Checkpoints of free runs, given by hand: what was saved, and how the run went on from it."""

import math
from typing import Any

import pytest

from assay.judge.levels import DiagnosedFault, LevelResult
from assay.training.judging.evidence import TrainEvidence
from assay.training.judging.free_run import judge_checkpoint
from assay.training.reports import FreeRun, StateValue
from assay.verdicts import Outcome
from packages.core.tests.unit.training.judging.evidence_by_hand import (
    LOSSES,
    evidence,
    free_run,
    ran,
    records,
    report,
)


def weight(name: str) -> StateValue:
    """A parameter that is not as it was."""
    return StateValue(f"model.{name}", "model", name)


def outcome_of(free: FreeRun) -> tuple[Outcome | None, str]:
    result = judge_checkpoint(ran(free))
    return result.level.verdict, result.level.reason or ""


def problem_of(made: TrainEvidence) -> tuple[str, str, str | None]:
    """Reason, diagnosis and parameter of what fails."""
    result = judge_checkpoint(made)
    finding = result.cause
    assert result.level.verdict is Outcome.FAIL
    assert isinstance(finding, DiagnosedFault)
    assert finding.location.phase == "checkpoint"
    return result.level.reason or "", finding.diagnosis, finding.location.parameter


def test_run_that_goes_on_to_the_bit_passes_and_counts_what_was_compared() -> None:
    result = judge_checkpoint(ran(free_run()))
    finding = result.cause

    assert (result.level.verdict, result.level.reason, finding) == (Outcome.PASS, None, None)
    # Tensors of the model folder, of the state, and a loss and a gradient norm of one step.
    assert result.level.compared == 3 + 6 + 2
    assert [(row.port, row.step, row.ratio) for row in result.measurements] == [
        ("loss", 2, 0.0),
        ("gradient norm", 2, 0.0),
    ]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"resumed": []}, "the run was not resumed"),
        ({"resumed": [], "compared": 0, "saved_compared": 0}, "the run was not resumed"),
        ({"saved_compared": 0}, "the checkpoint has no model that users could load"),
    ],
)
def test_checkpoint_of_which_nothing_can_be_said_is_no_pass(
    changed: dict[str, Any], reason: str
) -> None:
    assert outcome_of(free_run(**changed)) == (Outcome.NOT_COMPARED, reason)


@pytest.mark.parametrize(
    ("changed", "reason", "parameter"),
    [
        ({"problem": "load raised KeyError"}, "load raised KeyError", None),
        (
            {"saved": ["a.weight"]},
            "1 of 3 tensors in the model folder are not what the model held: a.weight",
            "a.weight",
        ),
        (
            {"settings": ["tie_word_embeddings"]},
            "the model folder's configuration is not the model's: tie_word_embeddings",
            None,
        ),
        (
            {"changed_by_saving": [weight("b.weight")]},
            "1 values are not as they were after saving: model.b.weight",
            "b.weight",
        ),
        (
            {
                "not_restored": [
                    StateValue("moments.a.weight.exp_avg", "moments"),
                    weight("a.weight"),
                ]
            },
            (
                "2 values are not as they were after loading the checkpoint:"
                " moments.a.weight.exp_avg, model.a.weight"
            ),
            "a.weight",
        ),
        (
            {"ended_otherwise": ["b.weight"]},
            (
                "after the last step 1 parameters and moments of the resumed run are not the"
                " uninterrupted run's: b.weight"
            ),
            None,
        ),
    ],
)
def test_each_way_to_lose_a_checkpoint_fails(
    changed: dict[str, Any], reason: str, parameter: str | None
) -> None:
    made = ran(free_run(**changed))

    assert problem_of(made) == (reason, "checkpoint-mismatch", parameter)


def test_state_that_is_not_taken_over_fails_whatever_the_checkpoint_does() -> None:
    made = evidence(reports=report(not_loaded=[weight("a.weight")]))

    assert problem_of(made)[0] == (
        "1 values are not as they were after load_state_dict: model.a.weight"
    )


def test_wrong_adapter_is_distinguished_from_a_wrong_state_beside_it() -> None:
    adapter = free_run(not_restored=[weight("a.lora_A.weight")])
    moment = free_run(not_restored=[StateValue("optimizer.0.step", "optimizer")])

    assert problem_of(ran(adapter, lora=True))[1] == "adapter-mismatch"
    assert problem_of(ran(adapter))[1] == "checkpoint-mismatch"
    assert problem_of(ran(moment, lora=True))[1] == "checkpoint-mismatch"


def test_only_generators_that_are_lost_are_random_numbers_and_nothing_else() -> None:
    generators = [StateValue(f"generators.{name}", "generators") for name in ("cpu", "python")]

    assert problem_of(ran(free_run(not_restored=generators)))[1] == "rng-state"
    mixed = free_run(not_restored=[*generators, weight("a.weight")])
    assert problem_of(ran(mixed))[1:] == ("checkpoint-mismatch", "a.weight")


def test_all_problems_are_said_and_the_first_of_a_checkpoint_s_life_is_the_finding() -> None:
    free = free_run(
        ended_otherwise=["b.weight"], not_restored=[weight("a.weight")], notes=["slow disk"]
    )

    result = judge_checkpoint(ran(free))

    assert "after loading the checkpoint" in problem_of(ran(free))[0]
    assert result.notes[0] == "slow disk"
    assert "after the last step" in result.notes[1]


@pytest.mark.parametrize(
    ("resumed", "port"),
    [
        (records([1.0 + 2.0**-52], 2), "loss"),
        (records([math.nan], 2), "loss"),
        (records([1.0], 2, grad_norm=0.5), "gradient norm"),
        (records([1.0], 2, grad_norm=math.nan), "gradient norm"),
    ],
)
def test_resumed_step_that_differs_in_a_bit_fails(resumed: list[Any], port: str) -> None:
    reason, diagnosis, _ = problem_of(ran(free_run(resumed=resumed)))

    assert reason == f"the {port} of step 2 is not the uninterrupted run's"
    assert diagnosis == "checkpoint-mismatch"


def test_gradient_norm_that_neither_run_can_tell_is_alike() -> None:
    steps = records(LOSSES, grad_norm=math.nan)

    assert outcome_of(free_run(steps=steps, resumed=steps[2:]))[0] is Outcome.PASS


@pytest.mark.parametrize(
    ("changed", "diagnosis"),
    [
        ({"generators_compared": False}, "rng-state"),
        ({"generators_compared": True}, "checkpoint-mismatch"),
        ({"generators_compared": False, "resumed": records([1.0], 2, 0.5)}, "checkpoint-mismatch"),
    ],
)
def test_other_first_loss_from_an_equal_state_is_drawn_unless_generators_are_alike(
    changed: dict[str, Any], diagnosis: str
) -> None:
    free = free_run(**{"resumed": records([1.5], 2)} | changed)

    assert problem_of(ran(free))[1] == diagnosis


def test_later_loss_from_an_equal_state_is_not_drawn() -> None:
    free = free_run(resumed=records([2.0, 1.5], 1), generators_compared=False)

    reason, diagnosis, _ = problem_of(evidence(reports=report(free), options={"resume_at": 1}))

    assert reason == "the loss of step 2 is not the uninterrupted run's"
    assert diagnosis == "checkpoint-mismatch"


def test_end_of_a_resumed_run_is_exact_on_two_ranks_and_left_to_its_noise_on_more() -> None:
    free = free_run(ended_otherwise=["b.weight"])

    assert problem_of(ran(free, free))[1] == "checkpoint-mismatch"
    result = judge_checkpoint(ran(free, free, free))
    finding = result.cause
    assert (result.level.verdict, finding) == (Outcome.PASS, None)
    assert result.notes[0].endswith("what follows is judged by its noise")


def test_on_many_ranks_only_what_no_sum_has_touched_is_exact_after_a_restart() -> None:
    later = free_run(resumed=records([2.0, 1.0 + 2.0**-52], 1))
    first = free_run(resumed=records([2.0 + 2.0**-51, 1.0], 1))

    def result_of(free: FreeRun, num_ranks: int) -> Outcome | None:
        made = evidence(reports=[report(free)] * num_ranks, options={"resume_at": 1})
        return judge_checkpoint(made).level.verdict

    assert result_of(later, 2) is Outcome.FAIL
    assert result_of(later, 3) is Outcome.PASS
    assert result_of(first, 3) is Outcome.FAIL


def test_trainer_that_declares_an_inexact_resume_has_its_first_loss_exact() -> None:
    later = free_run(resumed=records([2.0, 1.0 + 2.0**-52], 1), ended_otherwise=["b.weight"])
    first = free_run(resumed=records([2.0 + 2.0**-51, 1.0], 1))

    def result_of(free: FreeRun, declared: str | None) -> LevelResult:
        one = report(free, inexact_resume=declared)
        return judge_checkpoint(evidence(reports=[one], options={"resume_at": 1}))

    assert result_of(later, None).level.verdict is Outcome.FAIL
    passed = result_of(later, "it rounds differently")
    assert passed.level.verdict is Outcome.PASS
    assert passed.notes[0].startswith("it rounds differently: of the resumed run")
    assert result_of(first, "it rounds differently").level.verdict is Outcome.FAIL


def test_every_rank_goes_on_as_it_would_have() -> None:
    made = ran(free_run(), free_run(resumed=records([7.0], 2)))

    assert problem_of(made)[0] == "the loss of step 2 is not the uninterrupted run's"
    finding = judge_checkpoint(made).cause
    assert isinstance(finding, DiagnosedFault)
    assert finding.location.rank == 1


def test_checkpoint_that_one_rank_loses_is_lost() -> None:
    made = ran(free_run(), free_run(saved=["b.weight"]))

    assert problem_of(made)[2] == "b.weight"
