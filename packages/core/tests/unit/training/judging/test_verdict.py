"""From all that was measured to one verdict: what it says, and what it is about."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from assay.judge.results import ReplayResults
from assay.models.inspect.report import LoadReport, SetupChanges, WeightDifference
from assay.sites import Phase
from assay.training.judging.verdict import judge_training
from assay.training.protocol import OtherSetting
from assay.verdicts import Location, Outcome, Verdict
from packages.core.tests.unit.training.judging.evidence_by_hand import (
    KINDS,
    LABELS,
    LOGITS,
    LOSS,
    NORM,
    NOT_A_NUMBER,
    UNIT,
    UNTRAINED,
    VISIBLE,
    WRONG,
    Place,
    boundary,
    evidence,
    free_run,
    gradient,
    judged,
    output,
    report,
    rounding,
    step_results,
    times,
    trajectory,
    update,
)

PASS, FAIL, NOT_COMPARED = Outcome.PASS, Outcome.FAIL, Outcome.NOT_COMPARED
LEVELS = ("load", "inputs", "loss", "activations", "gradients", "updates", "checkpoint")
ALL_WEIGHTS = [f"{module}.weight" for module in KINDS]


def outcomes(verdict: Verdict) -> dict[str, Outcome]:
    """Of the levels that are no PASS."""
    found = {name: level.verdict for name, level in verdict.levels.items()}
    assert tuple(name for name in found if name != "replicas") == LEVELS
    return {name: one for name, one in found.items() if one is not None and one is not PASS}


def reason(verdict: Verdict, level: str) -> str:
    return verdict.levels[level].reason or ""


def wrong(*places: Place, error: Tensor = WRONG) -> Verdict:
    """Of one process with the same error at all these places."""
    return judged(step_results(dict.fromkeys(places, error)))


# A clean run


def test_clean_run_passes_each_level_and_counts_what_was_compared() -> None:
    verdict = judged()

    assert verdict.verdict is PASS
    assert outcomes(verdict) == {}
    assert {name: level.compared for name, level in verdict.levels.items()} == {
        "load": 1,
        "inputs": 2,  # tokens and labels
        "loss": 1 + 1,  # of the replayed steps, and of the free run
        "activations": 4,
        "gradients": 5
        + 3
        + 3
        + 4,  # at boundaries, after backward, reduction and clip with its norm
        # of the steps, alone and together, of the free and the resumed run
        "updates": 4 + 1 + 3 + 3,
        "replicas": 0,
        "checkpoint": 11,
    }
    assert verdict.compared == 1 + 2 + 2 + 4 + 15 + 11 + 11
    assert (verdict.location, verdict.diagnosis, verdict.suspects) == (None, None, [])


def test_clean_run_says_its_closest_call_and_what_it_would_have_seen() -> None:
    verdict = wrong(output("b"), error=rounding(1.25 * UNIT))

    # 1.25 units against half a unit: 5/6 of the limit of 3; half a unit of noise, three times.
    assert verdict.verdict is PASS
    assert (verdict.statistic, verdict.noise_ratio, verdict.limit) == ("replay-tensor", 2.5, 3.0)
    assert verdict.resolution == 1.5 * UNIT


def test_ranks_that_are_clean_pass_and_are_judged_at_the_same_places() -> None:
    assert judged(step_results(), step_results()).compared == judged().compared
    assert judged(step_results(), step_results()).verdict is PASS


# What is wrong fails, at its level


@pytest.mark.parametrize(
    ("place", "level"),
    [
        (LOSS, "loss"), (output("b"), "activations"), (LOGITS, "activations"),
        (boundary("a"), "gradients"), (gradient("a"), "gradients"),
        (gradient("a", "reduce"), "gradients"), (NORM, "gradients"), (update("a"), "updates"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("error", [WRONG, NOT_A_NUMBER], ids=["wrong", "nan"])
def test_error_fails_its_level_and_no_other(place: Place, level: str, error: Tensor) -> None:
    verdict = wrong(place, error=error)

    assert verdict.verdict is FAIL
    assert outcomes(verdict) == {level: FAIL}
    assert verdict.diagnosis is not None


def test_error_of_any_rank_fails_and_says_which() -> None:
    verdict = judged(step_results(), step_results(), step_results({output("b"): WRONG}))

    assert verdict.verdict is FAIL
    assert verdict.location is not None
    assert verdict.location.rank == 2


@pytest.mark.parametrize(("place", "level"), [(LABELS, "inputs"), (UNTRAINED, "updates")])
def test_value_that_must_be_exact_and_is_not_fails_its_level(place: Place, level: str) -> None:
    verdict = judged(step_results(different=[place]))

    assert outcomes(verdict) == {level: FAIL}
    assert (verdict.statistic, verdict.limit, verdict.noise_ratio) == ("exact", 0.0, math.inf)
    assert verdict.location is not None
    assert verdict.location.parameter is None


def test_verdict_says_the_numbers_of_what_failed() -> None:
    verdict, rows = judge_training(evidence(step_results({output("b"): WRONG})))

    # 32 units against half a unit.
    assert (verdict.statistic, verdict.noise_ratio, verdict.limit) == ("replay-tensor", 64.0, 3.0)
    row = next(row for row in rows if row.module == "b" and row.statistic == "replay-tensor")
    assert (row.level, row.ratio, row.actual) == ("activations", 64.0, 32 * UNIT)


def test_level_of_the_named_place_says_the_numbers_of_the_verdict() -> None:
    # A scale of 1.5 is further over the limits of systematic statistics than over the reported one.
    verdict = wrong(output("b"), output("norm"), error=times(1.5))

    level = verdict.levels["activations"].model_extra or {}
    names = ("statistic", "noise_ratio", "limit")
    assert verdict.statistic == "replay-tensor"
    assert {name: level[name] for name in names} == verdict.model_dump(include={*names})
    assert verdict.location is not None
    assert level["module"] == verdict.location.module


# Where nothing can be said there is no PASS


@pytest.mark.parametrize(
    ("place", "level", "name"),
    [
        (LABELS, "inputs", "(model):labels"), (LOSS, "loss", "(model):loss"),
        (output("norm"), "activations", "norm:output"),
        (boundary("norm"), "gradients", "norm:input.x"),
        (gradient("norm"), "gradients", "norm:gradient.weight"),
        (gradient("norm", "reduce"), "gradients", "norm:gradient.weight"),
        (NORM, "gradients", "(model):norm"), (update("norm"), "updates", "norm:update.weight"),
    ],
)  # fmt: skip
def test_missing_value_is_not_a_pass(place: Place, level: str, name: str) -> None:
    verdict = judged(step_results(missing=[place]))

    assert verdict.verdict is NOT_COMPARED
    assert outcomes(verdict) == {level: NOT_COMPARED}
    assert reason(verdict, level) == f"not seen: {name}"
    assert verdict.unmatched.expected == [name]


def test_value_that_one_of_several_ranks_lacks_is_not_a_pass() -> None:
    verdict = judged(step_results(), step_results(missing=[update("a")]))

    assert outcomes(verdict) == {"updates": NOT_COMPARED}


def test_value_that_the_reference_does_not_have_is_listed_and_forbids_nothing() -> None:
    candidate = step_results()
    candidate["modules"].unmatched_actual.append("extra:output")

    verdict = judged(candidate)

    assert verdict.verdict is PASS
    assert (verdict.unmatched.expected, verdict.unmatched.actual) == ([], ["extra:output"])


def test_error_beside_a_missing_value_is_a_failure() -> None:
    verdict = judged(step_results({boundary("b"): WRONG}, missing=[boundary("a")]))

    assert outcomes(verdict) == {"gradients": FAIL}


def test_nothing_measured_is_nothing_compared() -> None:
    empty = step_results()
    for results in empty.values():
        results.ports.clear()
    free = free_run(trajectory=[], resumed_trajectory=[], resumed=[], compared=0, saved_compared=0)

    verdict = judged(empty, noise=empty, reports=report(free), draws=True, load=LoadReport())

    assert verdict.verdict is NOT_COMPARED
    assert set(outcomes(verdict)) == set(LEVELS) - {"loss"}  # of which the free run tells
    assert reason(verdict, "activations") == "nothing was compared"
    assert verdict.noise_ratio is None


@pytest.mark.parametrize(
    ("phase", "level", "method"),
    [
        ("backward", "gradients", "backward"),
        ("reduce", "gradients", "reduce_gradients"),
        ("clip", "gradients", "clip_gradients"),
        ("optimizer", "updates", "optimizer_step"),
    ],
)
def test_method_that_is_never_called_is_not_a_pass(phase: Phase, level: str, method: str) -> None:
    seen = [one for one in VISIBLE if one != phase]

    verdict = judged(reports=report(seen=seen))

    assert outcomes(verdict) == {level: NOT_COMPARED}
    assert reason(verdict, level) == f"never called: {method}"


def test_noise_run_that_is_not_finite_is_no_measure_of_anything() -> None:
    spoilt = step_results({boundary("b"): NOT_A_NUMBER})

    verdict = judged(spoilt, noise=spoilt)
    assert outcomes(verdict) == {"gradients": NOT_COMPARED}
    assert reason(verdict, "gradients") == "the noise run itself is not finite there: b:input.x"

    verdict = judged(step_results({boundary("a"): WRONG}), noise=spoilt)
    assert outcomes(verdict) == {"gradients": FAIL}

    # Inputs are modules' ports too; what is not finite there is no input.
    spoilt = step_results({output("b"): NOT_A_NUMBER})
    assert outcomes(judged(spoilt, noise=spoilt)) == {"activations": NOT_COMPARED}


def test_losses_of_a_noise_run_that_are_not_finite_are_not_a_pass() -> None:
    verdict = judged(noise_losses=[4.0, math.nan, 1.0])

    assert outcomes(verdict) == {"loss": NOT_COMPARED}
    assert any(note.startswith("losses are not compared") for note in verdict.notes)


# What a trainer declares that it does not show


@pytest.mark.parametrize("phase", ["backward", "reduce", "clip"])
def test_declared_stage_is_not_missed_and_its_reason_is_reported(phase: Phase) -> None:
    results = step_results(missing=[gradient(module, phase) for module in KINDS])
    seen = [one for one in VISIBLE if one != phase]

    verdict = judged(results, results, reports=report(seen=seen, invisible_phases={phase: "fused"}))

    assert verdict.verdict is PASS
    assert verdict.unmatched.expected == []
    assert reason(verdict, "gradients") == f"{phase} is not visible: fused"
    assert f"{phase} is not visible: fused" in verdict.notes


def test_one_process_has_no_reduction_that_could_be_visible() -> None:
    verdict = judged(step_results(), reports=report(invisible_phases={"reduce": "fused"}))

    assert verdict.verdict is PASS
    assert not any("visible" in note for note in verdict.notes)


def test_declared_stage_excuses_no_other_that_is_missing() -> None:
    candidate = step_results(missing=[gradient("a", "reduce"), gradient("a", "clip")])

    verdict = judged(candidate, reports=report(invisible_phases={"reduce": "fused"}))

    assert outcomes(verdict) == {"gradients": NOT_COMPARED}
    assert verdict.unmatched.expected == ["a:gradient.weight"]


def test_optimizer_that_is_not_shown_is_not_a_pass() -> None:
    hidden = step_results(missing=[update(module) for module in KINDS])

    verdict = judged(hidden, reports=report(invisible_phases={"optimizer": "in C++"}))

    assert outcomes(verdict) == {"updates": NOT_COMPARED}
    assert reason(verdict, "updates") == "optimizer is not visible: in C++"


def test_what_a_partial_module_does_not_show_is_reported() -> None:
    partial_modules = report(
        partial_modules=["", "layers"], unmeasured_ports=[("layers", "input.mask")]
    )

    verdict = judged(reports=partial_modules)

    assert verdict.verdict is PASS
    assert any("no rank has all of (model), layers" in note for note in verdict.notes)
    assert "declared absent, or of no effect; not measured: layers:input.mask" in verdict.notes


def test_a_port_that_a_trainer_declares_absent_is_noted_on_a_single_process() -> None:
    fused = report(unmeasured_ports=[("", "output.logits")])

    note = "declared absent, or of no effect; not measured: (model):output.logits"
    assert note in judged(reports=fused).notes


def test_optimizer_of_tensors_of_its_own_cannot_be_compared() -> None:
    moved = step_results({update(module): WRONG for module in KINDS})
    still = step_results({update(module): times(0.0) for module in KINDS})
    foreign = report(not_in_optimizer=ALL_WEIGHTS)

    verdict = judged(moved, reports=foreign)
    assert outcomes(verdict) == {"updates": NOT_COMPARED, "checkpoint": NOT_COMPARED}
    assert verdict.diagnosis is None

    # One that moves nothing is wrong, and so is one that holds a part.
    assert judged(still, reports=foreign).diagnosis == "frozen-parameters"
    part = report(not_in_optimizer=ALL_WEIGHTS[:2])
    assert outcomes(judged(moved, reports=part)) == {"updates": FAIL}


# Weights that differ


def test_other_weights_are_a_note_within_all_limits_and_beyond_them_what_fails() -> None:
    different = report(weights_different=["a.weight"])

    verdict = judged(reports=different)
    assert (verdict.verdict, verdict.diagnosis) == (PASS, "below-resolution")
    assert "weights differ from the reference's, and no output shows it: a.weight" in verdict.notes

    verdict = judged(step_results({output("a"): WRONG}), reports=different)
    assert (verdict.verdict, verdict.diagnosis) == (FAIL, "weight-mismatch")


def test_weights_that_differ_by_more_than_their_rounding_fail_where_no_stage_does() -> None:
    rows = WeightDifference(
        name="a.weight", rows=(0, 7), num_differing=8, num_rows=260, error=1.0, largest=100.0
    )
    changed = report(weights_different=["a.weight"], changes=SetupChanges(weights=[rows]))

    verdict = judged(reports=changed)
    assert (verdict.verdict, verdict.diagnosis) == (FAIL, "weight-mismatch")
    assert verdict.location == Location(phase="forward", module="a", parameter="a.weight")
    assert (
        "a.weight changed after loading, before the first forward pass, in rows 0 to 7 of 260"
        in reason(verdict, "load")
    )

    # What a stage of the forward pass shows is told by it, later phases follow from the weight.
    verdict = judged(step_results({output("a"): WRONG}), reports=changed)
    assert (verdict.diagnosis, verdict.noise_ratio is None) == ("weight-mismatch", False)
    verdict = judged(step_results({update("a"): WRONG}), reports=changed)
    assert (verdict.diagnosis, verdict.noise_ratio) == ("weight-mismatch", None)


def test_weights_that_were_loaded_wrongly_come_before_all_that_fails() -> None:
    drawn = LoadReport(
        compared=3,
        weights=[WeightDifference(name="b.weight", num_differing=1, error=1.4, largest=1e9)],
    )

    verdict = judged(step_results({output("a"): WRONG}), load=drawn)
    assert (verdict.verdict, verdict.diagnosis) == (FAIL, "weight-mismatch")
    assert verdict.location == Location(phase="checkpoint", module="b", parameter="b.weight")


def test_notes_are_said_once() -> None:
    verdict = judged(reports=report(free_run(notes=["slow"])), notes=["slow", "slow"])

    assert verdict.notes.count("slow") == 1


# Where a free run ends


@pytest.mark.parametrize(
    ("facts", "reported"),
    [
        (
            {"noise_trajectory": trajectory(a=math.nan)},
            "the noise run itself does not end at a finite a.weight",
        ),
        (
            {"reports": report(free_run(trajectory=trajectory()[1:]))},
            "not seen after the last step: a.weight",
        ),
    ],
)
def test_parameter_of_whose_end_nothing_is_known_is_no_pass(
    facts: dict[str, Any], reported: str
) -> None:
    verdict = judged(**facts)

    assert outcomes(verdict) == {"updates": NOT_COMPARED}
    assert reason(verdict, "updates") == reported


@pytest.mark.parametrize(
    ("shows", "advice"),
    [
        (
            lambda arithmetic, value: arithmetic == "float32" and value == 0,
            "; float32 or --mixed-precision shows it",
        ),
        (lambda _, value: value >= 10, "; a value of about 10 would show"),
        (lambda *_: False, "; no larger value was found that shows"),
        (lambda *_: True, None),
    ],
)
def test_a_stated_setting_that_may_be_ignored_is_named(
    shows: Callable[[str, float], bool], advice: str | None
) -> None:
    def measure(arithmetic: str, other: OtherSetting | None) -> ReplayResults:
        is_wrong = other is not None and shows(arithmetic, other.value)
        return step_results({update("b"): WRONG} if is_wrong else {})["stage-optimizer"]

    verdict = judged(
        options={"parameter_groups": {"*norm*": {"weight_decay": 0.1, "lr": 1e-3}}},
        measure_adamw=measure,
    )
    unchecked = (
        "weight_decay 0.1 of '*norm*' was not checked: in bfloat16, an optimizer with 0 passes too"
    )
    assert verdict.verdict is PASS
    assert [note for note in verdict.notes if "was not checked" in note] == (
        [] if advice is None else [f"{unchecked}{advice}"]
    )
    extra = verdict.levels["updates"].model_extra or {}
    assert extra.get("unchecked", False) is (advice is not None)


@pytest.mark.parametrize(
    ("name", "stated", "ignored"),
    [("weight_decay", 0.1, 0.0), ("weight_decay", 0.0, 0.01), ("eps", 1e-6, 1e-8)],
)
def test_an_optimizer_that_ignores_a_setting_has_none_or_the_default(
    name: str, stated: float, ignored: float
) -> None:
    assert OtherSetting.instead("*", name, stated) == OtherSetting("*", name, ignored)
    assert OtherSetting.instead("*", "eps", 1e-8) is None
    assert OtherSetting.instead("*", "lr", 1.0) is None
