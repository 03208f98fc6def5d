import json
import math

import pytest
from pydantic import ValidationError

from assay.verdicts import (
    Coverage,
    Level,
    Location,
    Measurement,
    Outcome,
    Suspect,
    TokenPosition,
    Verdict,
    overall_outcome,
)


def measurement(**changes: object) -> Measurement:
    values = {
        "level": "modules", "module": "m", "port": "output", "statistic": "replay-tensor",
        "actual": 0.5, "expected": 0.25, "ratio": 2.0,
    }  # fmt: skip
    return Measurement.model_validate(values | changes)


def test_outcomes_and_exit_codes_are_those_of_the_contract() -> None:
    codes = {"PASS": 0, "NOT_COMPARED": 3, "FAIL": 1}
    assert {one.value: one.exit_code for one in Outcome} == codes
    schema = Verdict.model_json_schema()
    level, allowed = schema["$defs"]["Level"], {"$ref": "#/$defs/Outcome"}
    assert schema["$defs"]["Outcome"]["enum"] == list(codes)
    assert schema["properties"]["verdict"] == level["properties"]["verdict"]["anyOf"][0] == allowed


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([], Outcome.NOT_COMPARED),
        ([Outcome.PASS], Outcome.PASS),
        ([Outcome.PASS, Outcome.NOT_COMPARED], Outcome.NOT_COMPARED),
        ([Outcome.NOT_COMPARED, Outcome.FAIL, Outcome.PASS], Outcome.FAIL),
    ],
    ids=["none", "all pass", "one not compared", "one fails"],
)
def test_failure_counts_more_than_a_gap_and_a_gap_more_than_a_pass(
    outcomes: list[Outcome], expected: Outcome
) -> None:
    assert overall_outcome(outcomes) is expected


@pytest.mark.parametrize("outcome", [None, Outcome.NOT_COMPARED])
@pytest.mark.parametrize("reason", [None, ""])
def test_level_that_compared_nothing_says_why(outcome: Outcome | None, reason: str | None) -> None:
    with pytest.raises(ValidationError, match="needs a reason"):
        Level(verdict=outcome, reason=reason)
    assert Level(verdict=outcome, reason="no replicas").reason == "no replicas"


def test_only_a_pass_has_passed() -> None:
    for outcome in Outcome:
        verdict = Verdict(verdict=outcome)
        assert verdict.passed is bool(verdict) is (outcome is Outcome.PASS)


@pytest.mark.parametrize(
    ("value", "text"), [(math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan")]
)
def test_infinity_and_nan_are_strings_that_read_back(value: float, text: str) -> None:
    verdict = Verdict(verdict=Outcome.FAIL, noise_ratio=value, resolution=0.25)

    record = json.loads(verdict.to_json())
    read = Verdict.model_validate_json(verdict.to_json()).noise_ratio

    assert record["noise_ratio"] == text
    assert record["resolution"] == 0.25
    assert read == value or (math.isnan(value) and read is not None and math.isnan(read))


@pytest.mark.parametrize(
    ("value", "text"), [(math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan")]
)
def test_infinity_and_nan_in_details_of_a_level_are_kept(value: float, text: str) -> None:
    details = {"kl_mean": value, "resolution": {"replay-row": value, "replay-slope": 0.5}}
    level = Level.model_validate({"verdict": Outcome.FAIL, "reason": "nan logits"} | details)
    verdict = Verdict(verdict=Outcome.FAIL, levels={"logits": level})

    record = json.loads(verdict.to_json())["levels"]["logits"]
    read = Verdict.model_validate_json(verdict.to_json()).levels["logits"].model_extra

    assert record["kl_mean"] == text
    assert record["resolution"] == {"replay-row": text, "replay-slope": 0.5}
    assert record["reason"] == "nan logits"
    assert read is not None
    assert str(read["kl_mean"]) == text
    assert str(read["resolution"]["replay-row"]) == text


def test_verdict_survives_json_whole() -> None:
    location = Location(phase="forward", step=2, module="model.layers.3.mlp.down_proj", op="linear")
    verdict = Verdict(
        verdict=Outcome.FAIL,
        levels={"modules": Level(verdict=Outcome.FAIL, compared=7)},
        first_bad_token=TokenPosition(prompt=1, position=17, phase="decode"),
        location=location,
        suspects=[Suspect(location=location, statistic="replay-row", noise_ratio=14.6, limit=3.0)],
        diagnosis="module-error",
        compared=7,
    )

    assert Verdict.model_validate_json(verdict.to_json()) == verdict
    assert json.loads(verdict.to_json())["schema"] == 1


def test_location_without_a_module_is_null() -> None:
    record = json.loads(Location(phase="sampler").model_dump_json())

    assert record == {
        "phase": "sampler", "step": 0, "rank": 0, "module": None, "op": None, "parameter": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    "record",
    [
        {"verdict": "PASS", "unheard_of": 1},
        {"verdict": "MAYBE"},
        {"verdict": "FAIL", "diagnosis": "bad luck"},
        {"verdict": "FAIL", "location": {"phase": "afternoon"}},
        {"verdict": "FAIL", "first_bad_token": {"prompt": 0, "position": 0, "phase": "encode"}},
    ],
    ids=["key", "outcome", "diagnosis", "phase", "token phase"],
)
def test_unknown_key_is_refused(record: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Verdict.model_validate(record)


def test_measurement_writes_numbers_that_json_lacks() -> None:
    row = measurement(actual=math.nan, ratio=math.inf, limit=3.0)

    record = json.loads(row.model_dump_json())

    assert (record["actual"], record["ratio"], record["limit"]) == ("nan", "inf", 3.0)
    assert Measurement.model_validate_json(row.model_dump_json()).ratio == math.inf


def test_a_model_of_which_nothing_ran_is_not_compared() -> None:
    assert Coverage(modules=0, modules_run=0).outcome is Outcome.NOT_COMPARED
    assert Coverage(modules=2, modules_run=0, allowed=["*"]).outcome is Outcome.NOT_COMPARED
    assert Coverage(modules=2, modules_run=2).outcome is Outcome.PASS


@pytest.mark.parametrize(
    ("allowed", "forbidden", "outcome"),
    [
        ([], ["h.0.mlp", "h.1.bias", "h.1.experts.3"], Outcome.NOT_COMPARED),
        (["h.0", "h.1.bias"], ["h.1.experts.3"], Outcome.NOT_COMPARED),
        (["h.*"], [], Outcome.PASS),
    ],
)
def test_only_allowed_parts_may_stay_uncompared(
    allowed: list[str], forbidden: list[str], outcome: Outcome
) -> None:
    coverage = Coverage(
        modules=3,
        modules_run=2,
        not_run=["h.0.mlp"],
        unused_parameters=["h.1.bias"],
        unrouted_experts=["h.1.experts.3"],
        allowed=allowed,
    )

    assert coverage.forbidden_gaps == forbidden
    assert coverage.outcome is outcome
