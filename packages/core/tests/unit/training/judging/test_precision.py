"""What mixed precision promises, and what becomes of a run that does not keep it."""

from typing import Any

import pytest

from assay.training.judging.precision import find_broken_promise, is_explained_by
from assay.training.replay.observing.update_watch import MovedElements
from assay.training.state.precision import KeptPrecision
from assay.verdicts import Outcome, Verdict
from packages.core.tests.unit.training.judging.evidence_by_hand import (
    WRONG,
    evidence,
    failed_levels,
    free_run,
    gradient,
    judged,
    output,
    report,
    step_results,
    update,
)

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
        in_float32=lambda: noise["stage-optimizer"],
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
