"""Of several things that are wrong, which one the verdict is about."""

from typing import Any

import pytest

from assay.training.reports import HeldPart
from packages.core.tests.unit.training.judging.evidence_by_hand import (
    LOSS_GRADIENT,
    UNIT,
    WRONG,
    boundary,
    failed_levels,
    free_run,
    gradient,
    judged,
    output,
    records,
    report,
    rounding,
    step_results,
    times,
    trajectory,
    update,
)


def test_first_of_several_equal_errors_is_the_place_and_not_what_they_affect() -> None:
    order = [output("a"), output("b"), LOSS_GRADIENT, boundary("b"), gradient("a"),
             gradient("a", "reduce"), gradient("a", "clip"), update("a")]  # fmt: skip
    places = [
        ("forward", "a"), ("forward", "b"), ("backward", ""), ("backward", "b"), ("backward", "a"),
        ("reduce", "a"), ("clip", None), ("optimizer", "a"),
    ]  # fmt: skip

    for start, place in enumerate(places):
        location = judged(step_results(dict.fromkeys(order[start:], WRONG))).location
        assert location is not None
        assert (location.phase, location.module) == place


def test_mild_error_is_not_reported_for_one_that_is_far_worse_later() -> None:
    # 2 units are a third over the limit; 32 units, sixteen times as much.
    verdict = judged(step_results({output("a"): rounding(2 * UNIT), gradient("b"): WRONG}))

    assert verdict.location is not None
    assert (verdict.location.phase, verdict.location.module) == ("backward", "b")


def test_all_failed_stages_are_suspects_worst_first() -> None:
    verdict = judged(step_results({output("a"): WRONG, update("b"): 4 * WRONG}))

    places = [(item.location.phase, item.location.module) for item in verdict.suspects]
    assert places == [("optimizer", "b"), ("forward", "a")]
    assert [item.noise_ratio for item in verdict.suspects] == [256.0, 64.0]


def test_checkpoint_and_trajectory_are_not_reported_for_a_step_that_is_wrong() -> None:
    free = free_run(
        saved=["a.weight"], trajectory=trajectory(9.0), resumed_trajectory=trajectory(9.0)
    )

    verdict = judged(step_results({update("b"): WRONG}), reports=report(free))

    assert failed_levels(verdict) == {"updates", "checkpoint"}
    assert (verdict.diagnosis, verdict.noise_ratio) == ("optimizer-update", 64.0)


def test_checkpoint_is_reported_before_the_trajectory_that_it_affects() -> None:
    free = free_run(saved=["a.weight"], resumed_trajectory=trajectory(9.0))

    verdict = judged(reports=report(free))

    assert verdict.diagnosis == "checkpoint-mismatch"
    assert verdict.location is not None
    assert verdict.location.parameter == "a.weight"
    assert (verdict.statistic, verdict.limit) == ("exact", 0.0)


def test_run_that_ends_elsewhere_by_correct_steps_is_changed_beside_them() -> None:
    away = trajectory(b=32 * UNIT)

    verdict = judged(reports=report(free_run(trajectory=away, resumed_trajectory=away)))

    assert failed_levels(verdict) == {"updates"}
    assert (verdict.diagnosis, verdict.location and verdict.location.phase) == (
        "optimizer-update",
        "optimizer",
    )
    assert (verdict.statistic, verdict.noise_ratio) == ("trajectory-error", 32.0)


def test_only_the_resumed_run_that_ends_elsewhere_is_the_checkpoint_s_fault() -> None:
    verdict = judged(reports=report(free_run(resumed_trajectory=trajectory(b=32 * UNIT))))

    assert failed_levels(verdict) == {"updates"}
    assert verdict.diagnosis == "checkpoint-mismatch"
    assert verdict.location is not None
    assert (verdict.location.phase, verdict.location.step) == ("checkpoint", 2)


def test_losses_that_drift_away_by_correct_steps_fail() -> None:
    # The resumed run drifts alike.
    free = free_run(steps=records([4.0, 2.0, 1.5]), resumed=records([1.5], 2))

    verdict = judged(reports=report(free))

    assert failed_levels(verdict) == {"loss"}
    assert (verdict.diagnosis, verdict.statistic) == ("optimizer-update", "loss-error")


def test_ranks_that_hold_other_numbers_diverge_unless_a_step_is_wrong() -> None:
    weight = HeldPart("a.weight")
    reports = [report(free_run(held=[[(weight, digest)]])) for digest in "12"]

    verdict = judged(step_results(), step_results(), reports=reports)
    assert failed_levels(verdict) == {"replicas"}
    assert verdict.diagnosis == "replica-divergence"

    verdict = judged(step_results(), step_results({output("b"): WRONG}), reports=reports)
    assert failed_levels(verdict) == {"replicas", "activations"}
    assert verdict.diagnosis == "module-error"


def test_micro_batch_that_is_trained_twice_is_reported_before_all_it_affects() -> None:
    both = [(step, 0) for step in range(3)]
    reports = [report(micro_batches_run=both, coordinates={"dp": rank}) for rank in range(2)]
    spoilt = step_results({gradient("a"): WRONG})

    verdict = judged(spoilt, spoilt, reports=reports)

    assert verdict.diagnosis == "inputs-differ"
    assert verdict.levels["inputs"].reason == "micro-batch 0 of step 0 was trained 2 times"


@pytest.mark.parametrize(
    ("facts", "level", "diagnosis"),
    [
        ({"unexpectedly_trained": ["base.weight"]}, "updates", "optimizer-update"),
        ({"adapter_start": ["base.weight"]}, "activations", "adapter-mismatch"),
    ],
)
def test_what_the_trainer_s_state_shows_fails_beside_clean_measurements(
    facts: dict[str, Any], level: str, diagnosis: str
) -> None:
    verdict = judged(reports=report(**facts))

    assert failed_levels(verdict) == {level}
    assert (verdict.levels[level].reason or "").endswith(": base.weight")
    assert verdict.diagnosis == diagnosis
    assert verdict.location is not None
    assert (verdict.location.module, verdict.location.parameter) == ("base", "base.weight")
    # The closest call of what passes would be a number that decided nothing.
    assert (verdict.statistic, verdict.noise_ratio) == ("exact", None)


def test_base_weights_that_are_trained_come_before_an_adapter_that_starts_elsewhere() -> None:
    both = report(adapter_start=["a.lora_B"], unexpectedly_trained=["base.weight"])

    verdict = judged(reports=both)

    assert failed_levels(verdict) == {"activations", "updates"}
    assert verdict.diagnosis == "optimizer-update"
    assert verdict.location is not None
    assert verdict.location.parameter == "base.weight"


def test_finding_in_another_phase_than_the_first_error_says_its_own_numbers() -> None:
    # An update that is not there has a relative error of 1, against half a unit.
    verdict = judged(step_results({gradient("b"): times(0.5), update("a"): times(0.0)}))

    assert (verdict.diagnosis, verdict.location and verdict.location.module) == (
        "frozen-parameters",
        "a",
    )
    assert (verdict.statistic, verdict.noise_ratio) == ("replay-tensor", 2 / UNIT)
