"""The verdict over several expectations: met, missed, stale, of other software, of elsewhere."""

import pytest

from assay.verdicts import Outcome
from assay_expectations.records import (
    Content,
    Expectation,
    Key,
    LogProbabilities,
    Machine,
    Settings,
    Signature,
)
from assay_expectations.requests import Seen
from assay_expectations.verdicts import judge_pair, judge_seen

MACHINE = Machine(vendor="acme", architecture="a1", dtype="bfloat16", precision="bfloat16")
OTHER = MACHINE.model_copy(update={"architecture": "a2"})
CONTENT = Content(weights_hash="w", tokenizer_hash="t", prompts_hash="p", settings=Settings())
KEY = Key(machine=MACHINE, software={"torch": "2.13.0"}, content=CONTENT)
CAPTURED: list[LogProbabilities] = [[[[-1.01, -2.99]]]]
EXPECTATION = Expectation(
    schema=1,
    model="micro:llama",
    key=KEY,
    limits={"logits-error": 2.0, "logits-worst": 3.0},
    limits_origin="by hand",
    signature=Signature(
        tokens=[[[1]]], top_ids=[[[[1]]]], yardstick=[[[[-1.0, -3.0]]]], captured=CAPTURED
    ),
    provenance={},
)
RUN = "acme/bfloat16"


def seen(
    key: Key | None = KEY,
    values: list[LogProbabilities] = CAPTURED,
    machine: Machine = MACHINE,
    file: str = "a.json",
) -> Seen:
    compared = values if key == KEY else []
    return Seen(file=file, machine=machine, key=key, log_probabilities=compared)


def test_an_expectation_that_holds_passes() -> None:
    verdict, rows = judge_seen(RUN, [(EXPECTATION, seen())])
    assert verdict.verdict is Outcome.PASS
    assert (verdict.noise_ratio, verdict.limit, verdict.compared) == (1.0, 2.0, 1)
    assert [(row.level, row.statistic, row.ratio) for row in rows] == [
        ("a", "logits-error", 1.0),
        ("a", "logits-worst", 1.0),
    ]


def test_an_expectation_that_is_missed_fails_and_says_how_to_find_the_place() -> None:
    verdict, _ = judge_seen(RUN, [(EXPECTATION, seen(values=[[[[-1.1, -2.9]]]]))])
    assert verdict.verdict is Outcome.FAIL
    assert verdict.noise_ratio == pytest.approx(10)
    assert verdict.diagnosis is None
    (note,) = verdict.notes
    assert note == (
        "to find the place: assay check generate micro:llama --reference cpu/float32"
        " --candidate acme/bfloat16"
    )


def test_nan_is_a_failure_with_its_diagnosis() -> None:
    verdict, _ = judge_seen(RUN, [(EXPECTATION, seen(values=[[[[float("nan"), -2.9]]]]))])
    assert verdict.verdict is Outcome.FAIL
    assert verdict.diagnosis == "non-finite"


def test_a_stale_expectation_fails_and_says_what_differs() -> None:
    now = KEY.model_copy(update={"content": CONTENT.model_copy(update={"weights_hash": "w2"})})
    verdict, rows = judge_seen(RUN, [(EXPECTATION, seen(key=now))])
    assert verdict.verdict is Outcome.FAIL
    assert verdict.levels["a"].reason == (
        "stale, nothing can meet it: weights_hash is w2, expected w"
    )
    assert rows == []


def test_other_software_is_not_compared_and_says_what_differs() -> None:
    now = KEY.model_copy(update={"software": {"torch": "2.14.0"}})
    verdict, _ = judge_seen(RUN, [(EXPECTATION, seen(key=now))])
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert verdict.levels["a"].reason == "software.torch is 2.14.0, expected 2.13.0"
    assert verdict.unmatched.expected == ["a"]


def test_expectations_of_other_machines_are_no_pass() -> None:
    verdict, _ = judge_seen(RUN, [(EXPECTATION, seen(key=None, machine=OTHER))])
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert verdict.levels["expectations"].reason == (
        "a is of another machine: architecture is a2, expected a1"
    )
    assert verdict.unmatched.expected == []


def test_expectations_of_other_machines_do_not_disturb_those_of_this_one() -> None:
    elsewhere = seen(key=None, machine=OTHER, file="b.json")
    verdict, _ = judge_seen(RUN, [(EXPECTATION, seen()), (EXPECTATION, elsewhere)])
    assert verdict.verdict is Outcome.PASS
    assert list(verdict.levels) == ["a"]
    assert verdict.notes == ["b is of another machine: architecture is a2, expected a1"]


def test_one_that_is_not_compared_forbids_a_pass() -> None:
    now = KEY.model_copy(update={"software": {"torch": "2.14.0"}})
    pairs = [(EXPECTATION, seen()), (EXPECTATION, seen(key=now, file="b.json"))]
    assert judge_seen(RUN, pairs)[0].verdict is Outcome.NOT_COMPARED


def test_files_of_one_name_stay_apart() -> None:
    pairs = [(EXPECTATION, seen(file=f"{folder}/a.json")) for folder in ("x", "y")]
    assert list(judge_seen(RUN, pairs)[0].levels) == ["x/a.json", "y/a.json"]


def other_capture(values: list[LogProbabilities], **update: object) -> Expectation:
    signature = EXPECTATION.signature.model_copy(update={"captured": values})
    return EXPECTATION.model_copy(update={"signature": signature} | update)


def test_two_captures_are_compared_and_their_keys_too() -> None:
    key = KEY.model_copy(update={"machine": OTHER, "software": {"torch": "2.14.0"}})
    verdict, _ = judge_pair(EXPECTATION, other_capture([[[[-1.015, -2.985]]]], key=key))
    assert verdict.verdict is Outcome.PASS
    assert verdict.noise_ratio == pytest.approx(1.5)
    assert verdict.notes == [
        "machine.architecture is a2, expected a1",
        "software.torch is 2.14.0, expected 2.13.0",
    ]
    verdict, _ = judge_pair(EXPECTATION, other_capture([[[[-1.03, -2.97]]]]))
    assert verdict.verdict is Outcome.FAIL


def test_captures_of_different_models_are_not_compared() -> None:
    key = KEY.model_copy(update={"content": CONTENT.model_copy(update={"weights_hash": "w2"})})
    verdict, _ = judge_pair(EXPECTATION, other_capture(CAPTURED, key=key))
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert verdict.levels["signature"].reason == "weights_hash is w2, expected w"


def test_captures_of_different_tokens_are_not_compared() -> None:
    signature = EXPECTATION.signature.model_copy(update={"tokens": [[[2]]]})
    other = EXPECTATION.model_copy(update={"signature": signature})
    verdict, _ = judge_pair(EXPECTATION, other)
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert verdict.levels["signature"].reason == "their yardsticks chose other tokens"
