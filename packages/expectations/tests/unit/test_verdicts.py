"""Verdicts over expectations: met, missed, stale, with other software, of other machines."""

import pytest

from assay.comparing.coverage import Usage
from assay.verdicts import Outcome
from assay_expectations.judging.verdicts import judge_seen
from assay_expectations.records import Expectation, Key
from assay_expectations.requests import AllSeen, Seen
from packages.expectations.tests.unit.sample_expectations import (
    MACHINE,
    NOISE,
    VERSIONS,
    distributions,
    expectation,
    observed,
    off,
)

EXPECTATION = expectation()
OTHER = MACHINE.model_copy(update={"architecture": "a2"})
RUN = "acme/bfloat16"


def elsewhere(expected: Expectation = EXPECTATION) -> Expectation:
    """The expectation of another machine with the same rounding."""
    key = Key(machine=OTHER, content=expected.key.content)
    return expected.model_copy(update={"key": key})


def here(*seen: Seen, versions: dict[str, str] = VERSIONS) -> AllSeen:
    return AllSeen(machine=MACHINE, versions=versions, seen=list(seen))


def seen(given: float = NOISE, file: str = "a.json") -> Seen:
    return Seen(file=file, observed=observed(distributions(off(given))))


def test_met_expectation_passes() -> None:
    verdict, rows = judge_seen(RUN, [EXPECTATION], here(seen()))
    assert verdict.verdict is Outcome.PASS
    assert (verdict.noise_ratio, verdict.limit, verdict.compared) == (1.0, 2.0, 1)
    assert [(row.level, row.statistic, row.ratio) for row in rows] == [
        ("a", "logits-error", 1.0),
        ("a", "logits-worst", 1.0),
        ("a", "logits-whole", 1.0),
    ]
    assert verdict.notes == []


def test_missed_expectation_fails_with_the_next_command() -> None:
    wrong = observed(distributions(off(10 * NOISE)), most_likely=[-9.0, -9.5])
    verdict, _ = judge_seen(RUN, [EXPECTATION], here(Seen(file="a.json", observed=wrong)))
    assert verdict.verdict is Outcome.FAIL
    assert verdict.noise_ratio == pytest.approx(10)
    assert verdict.diagnosis is None
    assert "is 10.0x the error of the captured run (limit 2.0x)" in str(verdict.levels["a"].reason)
    (note,) = verdict.notes
    assert note == (
        "to find the module: assay check generate micro:llama --reference cpu/float32"
        " --candidate acme/bfloat16; if that passes, both sides share the fault, in the"
        " model's code or in assay's, and `git bisect` with this command finds the commit"
    )


def test_nan_is_a_failure_with_its_diagnosis() -> None:
    wrong = observed(distributions([float("nan"), -3.0]))
    verdict, _ = judge_seen(RUN, [EXPECTATION], here(Seen(file="a.json", observed=wrong)))
    assert verdict.verdict is Outcome.FAIL
    assert verdict.diagnosis == "non-finite"


def test_stale_expectation_fails_with_the_differences() -> None:
    stale = Seen(file="a.json", stale=["different tokenizer", "seed is 1, expected 0"])
    verdict, rows = judge_seen(RUN, [EXPECTATION], here(stale))
    assert verdict.verdict is Outcome.FAIL
    assert verdict.levels["a"].reason == (
        "stale, different content: different tokenizer; seed is 1, expected 0"
    )
    assert rows == []


def test_model_that_cannot_run_fails_and_others_are_judged() -> None:
    broken = Seen(file="b.json", problem="the weights lack lm_head.weight")
    verdict, _ = judge_seen(RUN, [EXPECTATION, EXPECTATION], here(seen(), broken))
    assert verdict.verdict is Outcome.FAIL
    assert verdict.levels["a"].verdict is Outcome.PASS
    assert verdict.levels["b"].reason == "the weights lack lm_head.weight"
    assert verdict.unmatched.expected == ["b"]


def test_changed_software_is_compared_and_listed() -> None:
    now = {"torch": "2.14.0", "runtime": "1"}
    verdict, _ = judge_seen(RUN, [EXPECTATION], here(seen(), versions=now))
    assert verdict.verdict is Outcome.PASS
    (note,) = verdict.notes
    assert note == (
        "a: changed since its capture: driver is absent, expected 7, runtime is 1, expected absent,"
        " torch is 2.14.0, expected 2.13.0"
    )


def test_changed_software_does_not_excuse_a_failure() -> None:
    now = VERSIONS | {"torch": "2.14.0"}
    verdict, _ = judge_seen(RUN, [EXPECTATION], here(seen(10 * NOISE), versions=now))
    assert verdict.verdict is Outcome.FAIL
    assert verdict.notes[0] == "a: changed since its capture: torch is 2.14.0, expected 2.13.0"


def test_expectations_of_other_machines_are_not_a_pass() -> None:
    verdict, rows = judge_seen(RUN, [elsewhere()], here(Seen(file="a.json")))
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert verdict.levels["expectations"].reason == (
        "a belongs to another machine: architecture is a1, expected a2"
    )
    assert verdict.unmatched.expected == []
    assert rows == []


def test_result_for_another_machine_is_shown_without_a_verdict() -> None:
    verdict, rows = judge_seen(RUN, [elsewhere()], here(seen()))
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert verdict.levels["expectations"].reason == (
        "a belongs to another machine: architecture is a1, expected a2; it is not judged here, where"
        " logits-error is 0.01 = 1x its noise (limit 2x)"
    )
    assert (verdict.compared, rows) == (0, [])


def test_expectations_of_other_machines_do_not_change_the_verdict() -> None:
    verdict, _ = judge_seen(RUN, [EXPECTATION, elsewhere()], here(seen(), Seen(file="b.json")))
    assert verdict.verdict is Outcome.PASS
    assert list(verdict.levels) == ["a"]
    assert verdict.notes == ["b belongs to another machine: architecture is a1, expected a2"]


def test_many_expectations_of_other_machines_are_one_note() -> None:
    others = [Seen(file=f"{name}.json") for name in "bcde"]
    verdict, _ = judge_seen(RUN, [EXPECTATION, *[elsewhere()] * 4], here(seen(), *others))
    assert verdict.notes == ["4 expectations belong to other machines: b, c, d, e"]


def test_files_with_equal_names_are_distinguished() -> None:
    both = [seen(file=f"{folder}/a.json") for folder in ("x", "y")]
    verdict, _ = judge_seen(RUN, [EXPECTATION, EXPECTATION], here(*both))
    assert list(verdict.levels) == ["x/a.json", "y/a.json"]


# One module ran, and one did not.
USAGE = Usage(parameters={"a": ["a.w"], "b.c": ["b.c.w"]}, called=["a"], read=["a.w"])


@pytest.mark.parametrize(
    ("allowed", "outcome"),
    [((), Outcome.NOT_COMPARED), (("b",), Outcome.PASS), (("d",), Outcome.NOT_COMPARED)],
)
def test_partly_run_model_passes_only_if_allowed(
    allowed: tuple[str, ...], outcome: Outcome
) -> None:
    partly = seen().model_copy(update={"usage": USAGE})
    verdict, _ = judge_seen(RUN, [EXPECTATION], here(partly), allowed)
    assert verdict.verdict is outcome
    assert verdict.coverage is not None
    assert verdict.coverage.not_run == ["b.c"]
    if outcome is Outcome.NOT_COMPARED:
        assert str(verdict.levels["a"].reason).startswith("never ran: b")


def test_full_coverage_is_reported() -> None:
    whole = USAGE.model_copy(update={"called": ["a", "b.c"], "read": ["a.w", "b.c.w"]})
    verdict, _ = judge_seen(
        RUN, [EXPECTATION], here(seen().model_copy(update={"usage": Usage(**whole.model_dump())}))
    )
    assert verdict.verdict is Outcome.PASS
    assert (verdict.levels["a"].model_extra or {})["coverage"] == (
        "coverage: all 2 modules with parameters ran"
    )
