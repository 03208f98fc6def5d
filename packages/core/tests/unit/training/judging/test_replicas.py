from dataclasses import dataclass
from typing import Any, Literal, cast

import pytest

from assay.judge.levels import DiagnosedFault
from assay.training.judging.evidence import TrainEvidence
from assay.training.judging.free_run import (
    find_unshared,
    find_wrong_masks,
    judge_replicas,
    notes_on_masks,
)
from assay.training.reports import HeldPart, LossCurve, ReferenceReport, TrainerReport, TrainOptions
from assay.verdicts import Outcome
from packages.core.tests.unit.training.judging.candidate_reports import report


@dataclass
class Reports:
    """Of an `Evidence` what this room reads."""

    reports: list[TrainerReport]
    options: TrainOptions
    reference: ReferenceReport

    @property
    def on_ranks(self) -> bool:
        return len(self.reports) > 1


def evidence(*reports: TrainerReport, steps: int = 1, draws: bool = False) -> TrainEvidence:
    options = TrainOptions(model="micro:llama", steps=steps)
    reference = ReferenceReport(
        model={}, reference={}, yardstick=LossCurve(), noise=LossCurve(), noise_trajectory=[],
        num_tokens=[], num_rows=[], num_trainable=0, shared=[], draws=draws,
    )  # fmt: skip
    made: Any = Reports(list(reports), options, reference)
    return cast("TrainEvidence", made)


def test_equal_copies_pass_and_are_counted_once_a_step() -> None:
    held = {HeldPart("a.weight"): "1", HeldPart("a.weight", "exp_avg"): "2"}

    result = judge_replicas(evidence(report(held, held), report(held, held)))

    assert (result.level.verdict, result.level.compared, result.cause) == (Outcome.PASS, 4, None)


def test_first_step_at_which_copies_differ_is_named_with_the_rank() -> None:
    a, b = HeldPart("a.weight"), HeldPart("b.weight")
    same, other = {a: "1", b: "2"}, {a: "1", b: "3"}

    result = judge_replicas(evidence(report(same, same), report(same, same), report(same, other)))
    finding = result.cause

    assert result.level.verdict is Outcome.FAIL
    assert isinstance(finding, DiagnosedFault)
    assert finding.diagnosis == "replica-divergence"
    place = finding.location
    assert (place.step, place.rank, place.parameter) == (1, 2, "b.weight")


def test_parts_that_no_other_rank_has_are_no_replicas() -> None:
    first, second = (HeldPart("a.weight", coordinates=((0, place),)) for place in range(2))

    result = judge_replicas(evidence(report({first: "1"}), report({second: "2"})))

    assert (result.level.verdict, result.cause) == (None, None)
    assert result.level.reason == "no rank holds what another one holds"


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        (((0, 0),), ((0, 1),), None),
        (((0, 0),), ((0, 0),), "micro-batch 0 of step 0 was trained 2 times"),
        (((0, 0),), (), "micro-batch 1 of step 0 was trained by no rank"),
    ],
)
def test_every_micro_batch_is_trained_once(
    first: tuple[tuple[int, int], ...],
    second: tuple[tuple[int, int], ...],
    problem: str | None,
) -> None:
    reports = report(micro_batches_run=first, dp=0), report(micro_batches_run=second, dp=1)

    assert find_unshared(evidence(*reports)) == problem


def test_ranks_of_one_replica_train_on_the_same() -> None:
    reports = [
        report(micro_batches_run=((0, 0), (0, 1)), dp=0, tp=0),
        report(micro_batches_run=((0, 0),), dp=0, tp=1),
    ]

    assert find_unshared(evidence(*reports)) == "ranks with dp=0 train on different micro-batches"


def test_mask_that_a_rank_uses_twice_is_found() -> None:
    clean, repeats = report(masks=("a", "b"), dp=0), report(masks=("c", "a", "c"), dp=1)

    assert find_wrong_masks(evidence(clean)) is None
    assert find_wrong_masks(evidence(report(), report())) is None
    found = find_wrong_masks(evidence(clean, repeats))
    assert found is not None
    assert (found.diagnosis, found.location.rank) == ("rng-state", 1)
    assert found.reason == "two micro-batches drop by the same random numbers"


@pytest.mark.parametrize(
    ("declared", "fails", "noted"),
    [("own", True, False), ("shared", False, False), (None, False, True)],
)
def test_masks_that_ranks_of_dp_share_are_what_the_trainer_declares_of_them(
    declared: Literal["own", "shared"] | None, *, fails: bool, noted: bool
) -> None:
    ranks = [
        report(masks=masks, dropout_masks=declared, dp=place, tp=number % 2)
        for number, (place, masks) in enumerate(
            [(0, ("a", "b")), (0, ("a", "b")), (1, ("c", "d")), (1, ("c", "b"))]
        )
    ]
    alike = "dp=0 and dp=1 drop by the same random numbers"

    assert find_wrong_masks(evidence(*ranks[:3])) is None
    assert notes_on_masks(evidence(*ranks[:3])) == []
    found = find_wrong_masks(evidence(*ranks))
    assert (found is not None) == fails
    if found is not None:
        assert (found.diagnosis, found.location.rank) == ("rng-state", 3)
        assert found.reason == f"{alike}, and the trainer declares that each draws its own"
    assert [note.startswith(alike) for note in notes_on_masks(evidence(*ranks))] == [True] * noted


def test_masks_that_ranks_of_dp_share_without_a_declaration_are_reported() -> None:
    first, second = report(masks=("a", "b"), dp=0), report(masks=("c", "d"), dp=1)
    shares, half = report(masks=("a", "d"), dp=1), report(masks=("a", "b"), dp=0, tp=1)

    assert notes_on_masks(evidence(first, second)) == []
    assert notes_on_masks(evidence(first, half)) == []
    noted = (
        "dp=0 and dp=1 drop by the same random numbers: where this is meant, declare"
        ' TrainerTraits(dropout_masks="shared"), else "own", which makes it a failure'
    )
    assert notes_on_masks(evidence(first, shares)) == [noted]


def test_masks_that_nobody_saw_are_reported_where_the_reference_drops() -> None:
    reported = ["masks of dropout are not compared: none is drawn by torch's own functions"]

    assert notes_on_masks(evidence(report(), draws=True)) == reported
    assert notes_on_masks(evidence(report(masks=("a",)), draws=True)) == []
    assert notes_on_masks(evidence(report(), draws=False)) == []
