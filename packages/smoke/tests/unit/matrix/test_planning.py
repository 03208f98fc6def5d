from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.errors import UsageError
from assay.verdicts import Outcome
from assay_smoke.commands.plan import plan as plan_cases
from assay_smoke.matrix.cases import case_of
from assay_smoke.matrix.durations import RecordedRun, record_runs
from assay_smoke.matrix.planning import PlanOptions, SmokePlan, plan_smoke


@pytest.fixture(autouse=True)
def no_history(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def plan(**options: Any) -> SmokePlan:
    return plan_smoke(PlanOptions(**options))


def ids(one: SmokePlan) -> list[str]:
    return [case.id for case in one.cases]


def ran(seconds: float, outcome: Outcome = Outcome.PASS) -> RecordedRun:
    return RecordedRun(seconds=seconds, outcome=outcome, time=datetime(2030, 1, 2, tzinfo=UTC))


def test_a_plan_says_of_each_case_why_how_long_and_how_to_repeat_it() -> None:
    first = plan().cases[0]
    assert first.command == f"assay smoke run {first.id}"
    assert case_of(first.id) == first.case
    assert first.reasons == ["never ran"]
    assert first.new_pairs == 66
    assert not first.recorded
    assert first.expected_seconds > 0


def test_new_pairs_add_up_to_what_is_covered() -> None:
    for coverage in ("one", "pairwise"):
        one = plan(coverage=coverage)
        assert sum(case.new_pairs for case in one.cases) == one.pairs.covered


def test_two_plans_are_the_same() -> None:
    assert plan(cards=8) == plan(cards=8)


@settings(deadline=None, max_examples=12)
@given(st.floats(0.5, 500))
def test_a_budget_is_never_exceeded_except_by_a_single_case(budget: float) -> None:
    one = plan(budget_seconds=budget)
    assert one.cases
    assert one.expected_seconds <= budget or len(one.cases) == 1
    assert {*ids(one)}.isdisjoint(case.id for case in one.left_out)
    assert sorted([*ids(one), *(case.id for case in one.left_out)]) == sorted(ids(plan()))


def test_what_a_budget_leaves_out_is_listed_with_the_pairs_lost() -> None:
    one = plan(budget_seconds=60.0)
    assert {case.reason for case in one.left_out} == {"over the budget of 60 s"}
    lost = [pair for case in one.left_out for pair in case.lost_pairs]
    assert sorted(lost) == sorted(one.pairs.uncovered)
    assert len(lost) == one.pairs.possible - one.pairs.covered > 0


def test_cards_of_a_vendor_run_cases_side_by_side() -> None:
    host, vendor = plan(), plan(vendor="amd")
    assert {*ids(host)} == {*ids(vendor)}
    assert vendor.expected_seconds < host.expected_seconds
    assert vendor.machine == "amd"
    assert len(ids(plan(vendor="amd", budget_seconds=60.0))) > len(ids(plan(budget_seconds=60.0)))


def test_what_a_vendor_lacks_is_not_planned() -> None:
    frameworks = {case.case.framework for case in plan(vendor="trainium").cases}
    assert frameworks == {"one-process", "ddp", "fsdp", "tensor-parallel", "pipeline"}
    assert any(refused.rule == "trainium-zero" for refused in plan(vendor="trainium").refused)


def test_what_failed_lately_comes_first_then_what_never_ran(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    *passed, failed, new = [case.case for case in plan().cases]
    runs = [(case, ran(5)) for case in passed] + [(failed, ran(5, Outcome.FAIL)), (failed, ran(5))]
    record_runs(path, "kind", runs)
    one = plan(history=path, machine="kind")
    assert ids(one)[:2] == [failed.id, new.id]
    assert one.cases[0].reasons == ["failed in 1 of its last 2 runs"]
    assert one.cases[1].reasons == ["never ran"]
    assert (one.cases[0].recorded, one.cases[1].recorded) == (True, False)
    assert one.cases[2].reasons == ["for its new pairs"]


def test_a_damaged_history_is_named_in_a_note(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    path.write_text("{", encoding="utf-8")
    one = plan(history=path)
    assert one.notes[0].startswith(f"not used: {path}: ")
    assert ids(one) == ids(plan())


def test_an_expression_chooses_ids() -> None:
    one = plan(expression="fsdp and not lora")
    assert ids(one)
    assert all("fsdp" in case_id and "lora" not in case_id for case_id in ids(one))
    assert {case.reason for case in one.left_out} == {"not -k 'fsdp and not lora'"}


@pytest.mark.parametrize(
    ("expression", "elsewhere"),
    [("fsdp-2-lora-offload-recompute-compile-packed-merged", "of all compatible cases match"),
     ("warp", "no compatible case matches")],
)  # fmt: skip
def test_an_expression_that_matches_nothing_is_an_error(expression: str, elsewhere: str) -> None:
    with pytest.raises(UsageError, match=elsewhere):
        plan(expression=expression)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cards": 0}, "--cards 0: "),
        ({"budget_seconds": 0.0}, "--budget 0s: "),
        ({"expression": "fsdp and"}, "-k 'fsdp and': "),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        plan(**options)
    assert str(raised.value).startswith(message)


def test_the_command_refuses_an_unknown_vendor() -> None:
    with pytest.raises(UsageError, match=r"^--vendor nvidai: there is cpu, nvidia"):
        plan_cases(vendor="nvidai")


def test_refusals_are_those_of_the_cards_that_are_planned_for() -> None:
    names = [refused.rule for refused in plan(cards=4).refused]
    assert "pipeline-recompute" in names
    assert "pipeline-layers-8" not in names
    assert "pipeline-layers-8" in [refused.rule for refused in plan(cards=8).refused]


def test_a_plan_is_read_back_from_its_json() -> None:
    one = plan(coverage="one")
    assert SmokePlan.model_validate_json(one.model_dump_json(by_alias=True)) == one


def test_how_little_is_known_is_told(tmp_path: Path) -> None:
    absent = tmp_path / "absent.json"
    known = plan_smoke(PlanOptions(vendor="trainium", cards=2, coverage="one", history=absent))
    unknown = plan_smoke(PlanOptions(vendor="amd", cards=2, coverage="one", history=absent))
    nothing = "no limits of amd cards are known: no rule excludes any case"
    assert f"--history {absent}: there is no such file" in unknown.notes
    assert any("no case has run on amd" in note for note in unknown.notes)
    assert nothing in unknown.notes
    assert not any("no limits" in note for note in known.notes)
