"""Losses, ends and kept precision of free runs, given by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest

from assay.training.judging.evidence import TrainEvidence
from assay.training.judging.free_run import (
    find_broken_promise,
    is_explained_by,
    judge_losses,
    judge_trajectory,
    notes_on_rounding,
    rows_of_curves,
    rows_of_free_run,
)
from assay.training.judging.verdict import judge_training
from assay.training.reports import (
    FreeRun,
    KeptPrecision,
    LossCurve,
    MovedElements,
    TrajectoryRecord,
)
from assay.verdicts import Measurement, Outcome, Verdict
from packages.core.tests.unit.training.judging.evidence_by_hand import (
    LOSSES,
    UNIT,
    WRONG,
    evidence,
    failed_levels,
    free_run,
    gradient,
    judged,
    output,
    ran,
    records,
    report,
    step_results,
    trajectory,
    update,
)


def losses(*values: float) -> FreeRun:
    return free_run(steps=records(values))


def ratio_of_losses(made: TrainEvidence) -> float:
    judged, _ = judge_losses(made)
    assert judged is not None
    return judged.value


# Losses


def test_losses_are_compared_by_the_root_mean_square_of_their_relative_errors() -> None:
    # Errors of 3, 0 and 4 units; the noise run's are 1, 0 and 0: sqrt(25 / 1). In bfloat16 the limit is 5.
    free = losses(4.0 * (1 + 3 * UNIT), 2.0, 1.0 - 4 * UNIT)

    judged, notes = judge_losses(ran(free))

    assert judged is not None
    assert judged.value == pytest.approx(5.0)
    assert judged.limit == 20.0 / 4
    # Of 4 nats 3 units, and 1, are 12/256 and 4/256.
    assert notes == [
        "largest difference of a loss over 3 free steps: 4.7e-2 nats (noise run: 1.6e-2)"
    ]


@pytest.mark.parametrize(("drift", "ratio"), [(0.5, 5.0), (2.0, 2.5), (20.0, 0.25), (22.0, 5.0)])
def test_losses_may_be_as_far_off_as_the_weights_if_these_are_within_their_limit(
    drift: float, ratio: float
) -> None:
    free = losses(4.0 * (1 + 3 * UNIT), 2.0, 1.0 - 4 * UNIT)
    free = replace(free, trajectory=trajectory(b=drift * UNIT))

    assert ratio_of_losses(ran(free)) == pytest.approx(ratio)


def test_a_step_that_changed_nothing_is_noted() -> None:
    steps = [record.model_copy(update={"updated": record.step != 1}) for record in records(LOSSES)]

    _, notes = judge_losses(ran(free_run(steps=steps)))

    assert notes[1] == (
        "steps of the free run that changed no parameter: 1, as one that is skipped for its loss"
        " scale does; of their updates nothing was compared there"
    )


@pytest.mark.parametrize(("units", "fails"), [(2.4, False), (2.6, True)])
def test_losses_of_a_noise_run_without_an_error_are_held_to_half_a_unit(
    units: float, fails: bool
) -> None:
    # One of three steps is wrong: the root mean square is the error over sqrt(3). 2.5 is 5 / 2.
    free = losses(4.0, 2.0, 1.0 + math.sqrt(3) * units * UNIT)

    judged, _ = judge_losses(ran(free, noise_losses=LOSSES))

    assert judged is not None
    assert judged.failed is fails


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_loss_that_is_not_finite_fails(value: float) -> None:
    assert ratio_of_losses(ran(losses(4.0, value, 1.0))) == math.inf


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_losses_are_not_compared_if_the_noise_run_s_are_not_finite(value: float) -> None:
    judged, (note,) = judge_losses(ran(losses(9.0, 9.0, 9.0), noise_losses=[4.0, value, 1.0]))

    assert judged is None
    assert note.startswith("losses are not compared: the noise run itself has")


def test_other_count_of_label_tokens_is_a_note_and_no_error() -> None:
    judged, notes = judge_losses(ran(free_run(), num_tokens=[8, 9, 8]))

    assert judged is not None
    assert not judged.failed
    assert notes[1:] == [
        "the trainer counts [8, 8, 8] label tokens in its steps, the reference [8, 9, 8]"
    ]


def numbers(rows: list[Measurement]) -> list[tuple[str, str, int, float, float]]:
    return [(row.level, row.statistic, row.step, row.actual, row.expected) for row in rows]


def test_each_step_of_the_free_run_has_a_row_beside_the_yardstick_s() -> None:
    free = free_run(steps=records([4.5, 2.0, 1.5], grad_norm=3.0), resumed=records([1.25], 2, 2.0))

    rows = rows_of_free_run(ran(free, noise_losses=[4.0, 2.5, 1.0]))

    assert numbers(rows) == [
        ("loss", "candidate-loss", 0, 4.5, 4.0), ("loss", "candidate-loss", 1, 2.0, 2.0),
        ("loss", "candidate-loss", 2, 1.5, 1.0),
        *(("gradients", "candidate-grad-norm", step, 3.0, 1.0) for step in range(3)),
        ("loss", "noise-loss", 0, 4.0, 4.0), ("loss", "noise-loss", 1, 2.5, 2.0),
        ("loss", "noise-loss", 2, 1.0, 1.0),
        *(("gradients", "noise-grad-norm", step, 1.0, 1.0) for step in range(3)),
        ("loss", "resumed-loss", 2, 1.25, 1.0), ("gradients", "resumed-grad-norm", 2, 2.0, 1.0),
    ]  # fmt: skip
    assert {row.limit for row in rows} == {None}


def test_norms_that_a_trainer_does_not_observe_have_no_rows() -> None:
    yardstick = LossCurve(losses=[2.0, 1.0], grad_norms=[1.0, 1.0])
    one_is_nan = LossCurve(losses=[2.0, math.nan], grad_norms=[1.0, math.nan])
    unobserved = LossCurve(losses=[2.0, 1.0], grad_norms=[math.nan, math.nan])

    diverged = LossCurve(losses=[2.0, math.nan], grad_norms=[math.nan, math.nan])
    curves = {"candidate": unobserved, "noise": one_is_nan, "resumed": diverged}

    rows = [row for row in rows_of_curves(curves, yardstick) if row.port == "grad-norm"]

    assert [(row.statistic, row.step) for row in rows] == [
        ("noise-grad-norm", 0), ("noise-grad-norm", 1),
        ("resumed-grad-norm", 0), ("resumed-grad-norm", 1),
    ]  # fmt: skip


def test_norms_of_the_free_run_are_not_judged() -> None:
    resumed = records(LOSSES[2:], 2, 1e9)
    far_off = ran(free_run(steps=records(LOSSES, grad_norm=1e9), resumed=resumed))

    verdict, rows = judge_training(far_off)

    assert [row.actual for row in rows if row.statistic == "candidate-grad-norm"] == [1e9] * 3
    assert verdict == judged(step_results())


def test_losses_that_only_one_rank_reports_are_a_note() -> None:
    _, notes = judge_losses(ran(free_run(), free_run(steps=records([math.nan] * 3))))

    assert notes[1:] == [
        "rank 1 reports the losses [nan, nan, nan], rank 0 [4.0, 2.0, 1.0]: those of rank 0 are judged"
    ]
    assert len(judge_losses(ran(free_run(), free_run()))[1]) == 1


def test_losses_under_dropout_are_compared_in_one_process_and_not_on_ranks() -> None:
    free = losses(9.0, 9.0, 9.0)

    judged, notes = judge_losses(ran(free, free, draws=True))
    assert judged is None
    assert "each rank draws the numbers of its own dropout" in notes[0]

    for made in (ran(free, draws=True), ran(free, free)):
        judged, _ = judge_losses(made)
        assert judged is not None
        assert judged.failed


# The course


def failed_ports(made: TrainEvidence) -> list[str]:
    return [
        f"{item.port.module}:{item.port.port}" for item in judge_trajectory(made) if item.failed
    ]


def test_trajectory_like_the_noise_run_s_is_judged_for_each_parameter_and_passes() -> None:
    judged = judge_trajectory(ran(free_run()))

    assert [item.value for item in judged] == [1.0] * 6
    assert {(item.port.module, item.port.port, item.port.stage.phase) for item in judged} == {
        (module, port, "optimizer")
        for module in ("a", "norm", "b")
        for port in ("trajectory.weight", "resumed-trajectory.weight")
    }


def test_parameter_that_ends_elsewhere_fails_in_the_run_in_which_it_does() -> None:
    free = free_run(
        trajectory=trajectory(b=21 * UNIT), resumed_trajectory=trajectory(norm=21 * UNIT)
    )

    assert failed_ports(ran(free)) == ["b:trajectory.weight", "norm:resumed-trajectory.weight"]


@pytest.mark.parametrize("error", [1e-30, math.inf, math.nan])
def test_parameter_of_size_zero_that_the_noise_run_never_moves_may_not_move(error: float) -> None:
    """Such as a bias that starts at zero and has no gradient."""
    noise = trajectory(0.0, 0.0)

    moved = free_run(
        trajectory=trajectory(0.0, 0.0, a=error), resumed_trajectory=trajectory(0.0, 0.0)
    )
    assert failed_ports(ran(moved, noise_trajectory=noise)) == ["a:trajectory.weight"]

    kept = free_run(trajectory=trajectory(0.0, 0.0), resumed_trajectory=trajectory(0.0, 0.0))
    assert failed_ports(ran(kept, noise_trajectory=noise)) == []
    assert len(judge_trajectory(ran(kept, noise_trajectory=noise))) == 6


@pytest.mark.parametrize(("units", "wrong"), [(19, []), (21, ["a:trajectory.weight"])])
def test_trajectory_without_noise_is_held_to_half_a_unit_of_the_parameter_s_size(
    units: float, wrong: list[str]
) -> None:
    # Parameters of size 8: half a unit of it, twenty times.
    moved = trajectory(0.0, 8.0, a=units / 2 * UNIT * 8)

    assert (
        failed_ports(ran(free_run(trajectory=moved), noise_trajectory=trajectory(0.0, 8.0)))
        == wrong
    )


@pytest.mark.parametrize(
    ("units", "declared", "wrong"),
    [(31, 2.0**-4, []), (33, 2.0**-4, ["b:trajectory.weight"]), (31, 0.0, ["b:trajectory.weight"])],
)
def test_declared_rounding_of_updates_is_added_to_what_the_limit_allows(
    units: float, declared: float, wrong: list[str]
) -> None:
    # The limit allows 20 units; 2^-4 of three updates of 2^-2 each are 12 more.
    free = free_run(trajectory=trajectory(b=units * UNIT))
    one = report(free, update_rounding=declared)
    made = evidence(reports=[one], options={"learning_rate": 0.25})

    assert failed_ports(made) == wrong
    assert [note.count("6.2e-02, relative") for note in notes_on_rounding(made)] == (
        [1] if declared else []
    )


def test_trajectory_that_is_no_number_fails() -> None:
    assert failed_ports(ran(free_run(trajectory=trajectory(b=math.nan)))) == ["b:trajectory.weight"]


def test_trajectory_says_nothing_of_a_parameter_whose_noise_is_not_finite() -> None:
    made = ran(free_run(trajectory=trajectory(1e3)), noise_trajectory=trajectory(b=math.nan))

    assert failed_ports(made) == ["a:trajectory.weight", "norm:trajectory.weight"]


def test_every_rank_s_trajectory_is_judged() -> None:
    judged = judge_trajectory(ran(free_run(), free_run(trajectory=trajectory(a=1.0))))

    assert [item.port.rank for item in judged if item.failed] == [1]


def test_parameter_that_a_rank_does_not_have_is_judged_where_it_is() -> None:
    rows = trajectory()
    parts = (
        free_run(trajectory=rows[:1], resumed_trajectory=[]),
        free_run(
            trajectory=[*rows[1:2], TrajectoryRecord(parameter="b.weight", error=1.0, size=1.0)],
            resumed_trajectory=[],
        ),
    )

    assert failed_ports(ran(*parts)) == ["b:trajectory.weight"]


def test_trajectory_under_dropout_is_judged_in_one_process_and_not_on_ranks() -> None:
    free = free_run(trajectory=trajectory(1.0))

    assert judge_trajectory(ran(free, free, draws=True)) == []
    assert len(failed_ports(ran(free, draws=True))) == 3


ALL = ["a.weight", "norm.weight", "b.weight"]
NO_COPIES = (
    "3 trained parameters are kept in bfloat16 without a copy in float32, which mixed precision"
    " promises: updates leave 75.0% of the weights where they are that the reference's move: a.weight,"
    " norm.weight, b.weight"
)
NARROW_MOMENT = (
    "1 moments are kept in less than float32, which mixed precision promises: b.weight exp_avg_sq"
)


def kept(**narrow: list[str]) -> KeptPrecision:
    return KeptPrecision(**narrow)


def promised(precision: KeptPrecision | None, changed: Any = None, **facts: Any) -> Verdict:
    """The verdict over a run that keeps what it trains so; None: nothing is promised."""
    noise = step_results()
    reports = report(free_run(kept=precision), **facts)
    return judged(
        step_results(changed),
        reports=reports,
        noise=noise,
        measure_adamw=lambda *_: noise["stage-optimizer"],
    )


def test_promise_that_is_kept_passes() -> None:
    verdict = promised(kept())

    assert verdict.verdict is Outcome.PASS
    assert (verdict.levels["updates"].model_extra or {})["noise_dtype"] == "float32"


@pytest.mark.parametrize(
    ("narrow", "parameter", "reason"),
    [
        (
            {"parameters": ALL},
            None,
            NO_COPIES,
        ),
        (
            {"moments": ["b.weight exp_avg_sq"]},
            "b.weight",
            NARROW_MOMENT,
        ),
        (
            {"rounded": ["a.weight"]},
            "a.weight",
            "1 parameters in float32 are rounded to bfloat16 between two steps: a.weight",
        ),
    ],
    ids=["parameters", "moments", "rounded"],
)
def test_what_is_kept_in_less_than_was_promised_is_another_update(
    narrow: dict[str, list[str]], parameter: str | None, reason: str
) -> None:
    verdict = promised(kept(**narrow), {update("a"): WRONG}, moved=MovedElements(8, 2))

    assert failed_levels(verdict) == {"updates"}
    assert verdict.levels["updates"].reason == reason
    assert verdict.diagnosis == "optimizer-update"
    assert verdict.location is not None
    assert (verdict.location.phase, verdict.location.parameter) == ("optimizer", parameter)


def test_nothing_is_asked_of_a_run_that_promises_nothing() -> None:
    facts: dict[str, Any] = {"errors_of_sums": {"a.weight": 2.0**-9}, "moved": MovedElements(8)}

    assert promised(None, **facts).verdict is Outcome.PASS
    assert "noise_dtype" not in (promised(None).levels["updates"].model_extra or {})


def test_copies_that_the_optimizer_has_keep_the_promise() -> None:
    assert promised(kept(copied=ALL)).verdict is Outcome.PASS


def test_error_of_an_earlier_phase_is_not_explained_by_the_optimizer() -> None:
    verdict = promised(kept(parameters=ALL), {output("b"): WRONG, update("a"): WRONG})

    assert verdict.location is not None
    assert (verdict.location.phase, verdict.location.module) == ("forward", "b")
    assert failed_levels(verdict) == {"activations", "updates"}


# Two micro-batches: a sum in float32 is off by at most 4 * 2 roundings of it.
@pytest.mark.parametrize(
    ("error", "fails"), [(7 * 2.0**-24, False), (9 * 2.0**-24, True), (2.0**-9, True)]
)
def test_sums_of_gradients_are_as_good_as_float32(*, error: float, fails: bool) -> None:
    verdict = promised(kept(), errors_of_sums=dict.fromkeys(ALL, 0.0) | {"b.weight": error})

    assert (verdict.verdict is Outcome.FAIL) == fails
    if fails:
        assert verdict.levels["gradients"].reason == (
            "gradients are added up in bfloat16, which mixed precision does in float32: b.weight"
        )
        assert verdict.diagnosis == "module-error"
        assert verdict.location is not None
        assert (verdict.location.phase, verdict.location.parameter) == ("backward", "b.weight")


@pytest.mark.parametrize(("narrow", "fails"), [(1000, True), (999, False), (0, False)])
def test_sharded_sums_that_all_fit_16_bits_were_made_in_them(narrow: int, *, fails: bool) -> None:
    verdict = promised(kept(), sharded_gradients=1000, narrow_gradients=narrow)

    assert (verdict.verdict is Outcome.FAIL) == fails


def test_gradient_that_lacks_a_part_is_no_matter_of_precision() -> None:
    verdict = promised(kept(), {gradient("a"): WRONG}, errors_of_sums={"a.weight": 0.7})

    assert verdict.diagnosis == "missing-reduction"


def test_promise_explains_what_follows_from_it() -> None:
    made = evidence(reports=report(free_run(kept=kept(parameters=ALL))))
    promise = find_broken_promise(made)

    assert promise is not None
    assert is_explained_by("optimizer", promise)
    assert not any(is_explained_by(phase, promise) for phase in ("inputs", "forward", "clip"))
