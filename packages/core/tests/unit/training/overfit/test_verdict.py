"""What counts as memorized, on curves made by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest

from assay.judge.coverage import Usage
from assay.judge.limits import Limits
from assay.training.overfit.verdict import (
    OverfitEvidence,
    judge_overfit,
    last_part,
    why_not_overfit,
)
from assay.training.reports import (
    LossCurve,
    Memorization,
    OverfitCandidate,
    OverfitReference,
    TrainCheck,
    TrainOptions,
)
from assay.verdicts import Outcome

# Halves with every step: 4, 2, 1, ... 2^-7. Its second half begins with 2^-3, its last fifth is
# 2^-6 and 2^-7.
LOSSES = [4.0 * 0.5**step for step in range(10)]
NOISE = [4.0 * (1 + 1e-6), *LOSSES[1:]]
TARGET, REACHED = 2.0**-3, 0.75 * 2.0**-6
NORMS = [1.0] * 10
KNOWN = {"labels": 2.0**-7, "prompt": 3.0, "padding": 8.0, "labels shifted twice": 9.0}
NAMES = ["a.weight", "b.weight"]
USAGE = Usage(parameters={"a": NAMES[:1], "b": NAMES[1:]}, called=["a", "b"], read=NAMES)


def evidence(losses: list[float] | None = None, **candidate: Any) -> OverfitEvidence:
    facts: dict[str, Any] = {
        "run": {}, "curve": LossCurve(losses=losses or LOSSES, grad_norms=NORMS), "num_tokens": [20],
        "unmoved": [], "touched": NAMES,
    }  # fmt: skip
    reference = OverfitReference(
        model={}, reference={}, yardstick=LossCurve(losses=LOSSES, grad_norms=NORMS),
        noise=LossCurve(losses=NOISE, grad_norms=NORMS), memorization=Memorization(nats=KNOWN), num_tokens=20,
        trainable=NAMES, moved=NAMES, touched=NAMES, usage=USAGE,
    )  # fmt: skip
    limits = Limits("mine", "made up", {"loss-error": 20.0})
    candidates = [OverfitCandidate.model_validate(facts | candidate)]
    check = TrainCheck(TrainOptions(model="mine"), "cpu/float32", "cpu/float32")
    return OverfitEvidence(check, reference, limits, candidates, Memorization(nats=KNOWN))


def test_part_that_predicting_the_sequences_does_not_use_is_not_compared() -> None:
    judged = evidence()
    reference = judged.reference.model_copy(
        update={"usage": USAGE.model_copy(update={"called": ["a"], "read": NAMES[:1]})}
    )
    judged = replace(judged, reference=reference)

    assert judge_overfit(judged)[0].verdict is Outcome.NOT_COMPARED
    assert (
        judge_overfit(replace(judged, check=replace(judged.check, allow_unused=("b",))))[0].verdict
        is Outcome.PASS
    )


def reason(judged: OverfitEvidence) -> str:
    verdict, _ = judge_overfit(judged)
    assert verdict.verdict is Outcome.FAIL
    return verdict.levels["overfit"].reason or ""


def test_last_part_is_a_fifth_and_at_least_one_step() -> None:
    assert last_part([5.0, 4.0, 3.0, 2.0, 1.0]) == [1.0]
    assert last_part(LOSSES) == LOSSES[8:]
    assert last_part([7.0]) == [7.0]


def with_noise(losses: list[float]) -> OverfitEvidence:
    base = evidence()
    noise = LossCurve(losses=losses, grad_norms=NORMS)
    return replace(base, reference=base.reference.model_copy(update={"noise": noise}))


def test_target_is_the_highest_loss_in_the_second_half_of_yardstick_and_noise_run() -> None:
    assert evidence().target == TARGET
    assert with_noise([*LOSSES[:5], 0.2, *LOSSES[6:]]).target == 0.2


def test_target_is_nearer_to_what_is_reached_than_to_the_first_loss() -> None:
    # They end at the median of 2^-6 and 2^-7: the middle to 4, by ratios, is sqrt(3)/8.
    late = with_noise([*LOSSES[:5], 3.0, *LOSSES[6:]])

    assert late.reached == REACHED
    assert late.target == pytest.approx(math.sqrt(3) / 8)


def test_the_reference_itself_passes_and_says_its_numbers() -> None:
    verdict, rows = judge_overfit(evidence())

    assert verdict.verdict is Outcome.PASS
    assert (verdict.noise_ratio, verdict.limit, verdict.statistic) == (0.0, 20.0, "loss-error")
    level = verdict.levels["overfit"].model_extra or {}
    assert (level["first_loss"], level["target"], level["final_loss"]) == (
        4.0,
        TARGET,
        REACHED,
    )
    # Start, end and exam are judged; of four curves each step is shown.
    assert [row.statistic for row in rows if row.limit is not None] == [
        "loss-error", "overfit-loss", "overfit-memorization",
    ]  # fmt: skip
    assert len(rows) == 3 + 4 * 10
    assert verdict.compared == 3


@pytest.mark.parametrize(
    ("last", "outcome"), [(TARGET, Outcome.PASS), (TARGET * 1.001, Outcome.FAIL)]
)
def test_the_median_of_the_last_fifth_has_to_reach_the_target(
    last: float, outcome: Outcome
) -> None:
    verdict, _ = judge_overfit(evidence([*LOSSES[:8], last, last]))

    assert verdict.verdict is outcome


def test_loss_that_is_no_number_is_a_divergence_at_its_step() -> None:
    judged = evidence([*LOSSES[:6], math.nan, *LOSSES[7:]])

    assert reason(judged) == "it diverges: the loss of step 6 is nan"
    verdict, _ = judge_overfit(judged)
    assert verdict.diagnosis == "non-finite"
    assert verdict.location is not None
    assert verdict.location.step == 6


@pytest.mark.parametrize("late", [math.nan, math.inf])
def test_last_loss_that_is_no_number_fails(late: float) -> None:
    assert "it diverges" in reason(evidence([*LOSSES[:9], late]))


def test_first_losses_are_held_to_the_noise_run() -> None:
    # The noise run is off by 1e-6 in one of three losses.
    near = evidence([4.0 * (1 + 15e-6), *LOSSES[1:]])
    far = evidence([4.0 * (1 + 25e-6), *LOSSES[1:]])

    assert judge_overfit(near)[0].verdict is Outcome.PASS
    assert judge_overfit(near)[0].noise_ratio == pytest.approx(15.0, rel=1e-4)
    assert reason(far).startswith("the first losses are not the reference's: 4.0001, 2, 1 instead")


def test_wrong_loss_before_any_update_is_distinguished_from_a_wrong_update() -> None:
    at_once, _ = judge_overfit(evidence([loss * 1.5 for loss in LOSSES]))
    after, _ = judge_overfit(evidence([4.0, 3.0, *LOSSES[2:]]))

    assert at_once.diagnosis == "loss-scale"
    assert after.diagnosis == "optimizer-update"


def test_ranks_that_draw_their_own_numbers_are_held_to_the_target_only() -> None:
    other = evidence([4.5, *LOSSES[1:]])
    drawing = replace(
        other,
        reference=other.reference.model_copy(update={"draws": True}),
        candidates=other.candidates * 2,
    )

    assert judge_overfit(other)[0].verdict is Outcome.FAIL
    verdict, _ = judge_overfit(drawing)
    assert verdict.verdict is Outcome.PASS
    assert any("first losses are not compared" in note for note in verdict.notes)


@pytest.mark.parametrize(
    ("candidate", "said"),
    [
        ({"unmoved": ["b.weight"]}, "1 of 2 parameters are never changed: b.weight"),
        ({"unmoved": NAMES}, "nothing is trained: no step changes a bit of any parameter"),
        ({"touched": [*NAMES, "base.weight"]}, "trained, and should not be: base.weight"),
    ],
)
def test_parameters_have_to_move_where_the_reference_moves_them(
    candidate: dict[str, Any], said: str
) -> None:
    assert reason(evidence(**candidate)) == said


def test_parameter_that_rounding_keeps_still_in_the_noise_run_may_keep_still() -> None:
    judged = evidence(unmoved=["b.weight"])
    rounded = judged.reference.model_copy(update={"moved": ["a.weight"]})

    assert judge_overfit(replace(judged, reference=rounded))[0].verdict is Outcome.PASS


# Between 0.75 * 2^-6 and 8 nats lies, by ratios, sqrt(0.75 / 8) = 0.306.
@pytest.mark.parametrize(("padding", "outcome"), [(0.31, Outcome.PASS), (0.30, Outcome.FAIL)])
def test_padding_is_memorized_when_its_loss_is_nearer_to_that_than_to_the_reference(
    padding: float, outcome: Outcome
) -> None:
    judged = replace(evidence(), memorization=Memorization(nats=KNOWN | {"padding": padding}))

    assert judge_overfit(judged)[0].verdict is outcome


def test_weights_that_do_not_know_the_labels_fail_whatever_the_losses_say() -> None:
    judged = replace(evidence(), memorization=Memorization(nats=KNOWN | {"labels": 2.0}))

    assert reason(judged) == (
        "it memorizes something else: its losses end at 0.0117 nats per label token, its weights give"
        " 2 on the trusted device"
    )


def test_weights_of_another_model_are_not_compared() -> None:
    verdict, _ = judge_overfit(replace(evidence(), memorization=Memorization(missing=["a.weight"])))

    assert verdict.verdict is Outcome.NOT_COMPARED
    assert "not of this model: without a.weight" in (verdict.levels["overfit"].reason or "")


@pytest.mark.parametrize(
    ("losses", "absent"),
    [
        ([10.0] * 8 + [0.69, 0.69], None),
        ([10.0] * 8 + [0.70, 0.70], "not below 0.693"),
        ([2.0] * 8 + [0.51, 0.51], "not below 0.5"),
        ([2.0] * 8 + [math.nan, 0.1], "a loss of nan"),
    ],
)
def test_reference_that_memorizes_nothing_gives_no_target(
    losses: list[float], absent: str | None
) -> None:
    base = evidence()
    curve = LossCurve(losses=losses, grad_norms=NORMS)
    reference = base.reference.model_copy(update={"yardstick": curve, "noise": curve})
    alone = replace(base, reference=reference, candidates=[], memorization=None)

    why = why_not_overfit(alone)
    assert (why is None) if absent is None else (why is not None and absent in why)
    if absent is not None:
        assert judge_overfit(alone)[0].verdict is Outcome.NOT_COMPARED
