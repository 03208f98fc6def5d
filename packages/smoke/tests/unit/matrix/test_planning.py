"""Plans: expressions, order, schedule, budget, and what a plan says."""

from datetime import UTC, datetime
from math import comb
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.errors import UsageError
from assay.verdicts import Outcome
from assay_smoke.commands import plan as plan_cases
from assay_smoke.matrix.planning import (
    PlanOptions,
    RecordedRun,
    SmokePlan,
    TimedJob,
    compile_expression,
    order_by_value,
    parse_budget,
    plan_smoke,
    record_runs,
    schedule_jobs,
)
from assay_smoke.matrix.rules import AXES, Case, case_of, pairs_of


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
    assert first.new_pairs == comb(len(AXES), 2)
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


IDS = ("fsdp-2-lora", "fsdp-4-offload", "ddp-2", "zero1-2-lora-offload")


@pytest.mark.parametrize(
    ("expression", "chosen"),
    [
        ("fsdp", {0, 1}),
        ("FSDP", {0, 1}),
        ("fsdp-2", {0}),
        ("lora and offload", {3}),
        ("lora or offload", {0, 1, 3}),
        ("not lora", {1, 2}),
        ("not not lora", {0, 3}),
        # `and` binds closer than `or`, `not` closest.
        ("ddp or lora and offload", {2, 3}),
        ("(ddp or lora) and offload", {3}),
        ("not lora and not ddp", {1}),
        ("not (lora or ddp)", {1}),
        ("(fsdp)and(lora)", {0}),
        ("nothing", set()),
        ("  zero1  ", {3}),
    ],
)
def test_ids_are_chosen_as_pytest_chooses_names(expression: str, chosen: set[int]) -> None:
    matches = compile_expression(expression)
    assert {number for number, name in enumerate(IDS) if matches(name)} == chosen


@pytest.mark.parametrize(
    ("expression", "column", "problem"),
    [
        ("", 1, "a word of an id was expected"),
        ("lora and", 9, "a word of an id was expected"),
        ("and lora", 1, "a word of an id was expected"),
        ("(lora", 6, "a closing parenthesis was expected"),
        ("lora)", 5, "and, or, or the end was expected"),
        ("lora ddp", 6, "and, or, or the end was expected"),
        ("lora & ddp", 6, "'&' cannot be in an id"),
        ("()", 2, "a word of an id was expected"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_column(
    expression: str, column: int, problem: str
) -> None:
    with pytest.raises(UsageError) as raised:
        compile_expression(expression)
    assert str(raised.value).startswith(f"-k {expression!r}: {problem} at column {column};")


NAMES = ("one-process-1", "ddp-2", "ddp-2-lora", "ddp-4-lora", "zero3-4-mixtral-offload-sigterm")


def equally_urgent(case: Case) -> tuple[bool, ...]:
    return (False,)


def one_second(case: Case) -> float:
    return 1.0


def test_new_pairs_add_up_to_all_pairs_and_each_counts_once() -> None:
    cases = [case_of(name) for name in NAMES]
    ordered = order_by_value(cases, equally_urgent, one_second)
    new = [pair for valued in ordered for pair in valued.new_pairs]
    assert len(set(new)) == len(new)
    assert set(new) == {pair for case in cases for pair in pairs_of(case)}
    assert {valued.case for valued in ordered} == set(cases)


def test_most_new_pairs_for_each_second_come_first() -> None:
    cases = [case_of(name) for name in NAMES]
    ordered = order_by_value(cases, equally_urgent, one_second)
    gains = [len(valued.new_pairs) for valued in ordered]
    # All have equally many pairs: the first is the first by name; `ddp-4-lora` shares most with others.
    assert gains == sorted(gains, reverse=True)
    assert gains[0] == comb(len(AXES), 2)

    def slow_if_large(case: Case) -> float:
        return 1000.0 if case.cards == 4 else 1.0

    slow = [valued.case.cards for valued in order_by_value(cases, equally_urgent, slow_if_large)]
    assert slow[-2:] == [4, 4]


def test_what_is_urgent_comes_first_however_little_it_adds() -> None:
    cases = [case_of(name) for name in NAMES]

    def urgency(case: Case) -> tuple[bool, ...]:
        return case.id == "ddp-4-lora", case.id == "ddp-2"

    ordered = [valued.case.id for valued in order_by_value(cases, urgency, one_second)]
    assert ordered[:2] == ["ddp-4-lora", "ddp-2"]


def test_the_order_does_not_depend_on_that_of_the_cases() -> None:
    cases = [case_of(name) for name in NAMES]
    forward = order_by_value(cases, equally_urgent, one_second)
    assert forward == order_by_value(cases[::-1], equally_urgent, one_second)


def test_no_cases_have_no_order() -> None:
    assert order_by_value([], equally_urgent, one_second) == []


some_jobs = st.lists(
    st.builds(TimedJob, slots=st.integers(1, 8), seconds=st.floats(0.1, 100)),
    max_size=30,
)


def test_jobs_on_one_slot_run_one_after_the_other() -> None:
    assert schedule_jobs([TimedJob(4, 10.0), TimedJob(1, 5.0)], 1)[1] == 15


def test_jobs_on_disjoint_cards_run_at_once() -> None:
    jobs = [TimedJob(2, 10.0), TimedJob(1, 8.0), TimedJob(1, 7.0), TimedJob(4, 3.0)]
    assert schedule_jobs(jobs, 4)[1] == 13


def test_a_job_that_needs_more_cards_than_there_are_takes_all() -> None:
    assert schedule_jobs([TimedJob(8, 10.0), TimedJob(1, 5.0)], 2)[1] == 15


@settings(deadline=None)
@given(some_jobs, st.integers(1, 8))
def test_without_a_budget_every_job_is_scheduled_once(jobs: list[TimedJob], slots: int) -> None:
    numbers, seconds = schedule_jobs(jobs, slots)
    assert sorted(numbers) == list(range(len(jobs)))
    assert seconds <= sum(job.seconds for job in jobs) + 1e-6


@settings(deadline=None)
@given(some_jobs, st.integers(1, 4), st.floats(0.01, 200))
def test_a_budget_is_kept_unless_by_a_single_job(
    jobs: list[TimedJob], slots: int, budget: float
) -> None:
    numbers, seconds = schedule_jobs(jobs, slots, budget)
    assert len({*numbers} & {*range(len(jobs))}) == len(numbers)
    assert seconds <= budget or numbers == [0]
    assert bool(numbers) == bool(jobs)


def test_a_cheap_job_fits_where_a_dear_one_before_it_does_not() -> None:
    numbers, _ = schedule_jobs([TimedJob(1, 6.0), TimedJob(1, 5.0), TimedJob(1, 4.0)], 1, 10)
    assert numbers == [0, 2]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30m", 1800), ("90s", 90), ("1h", 3600), ("1h30m", 5400), ("1.5m", 90), ("2m 0s", None)],
)
def test_a_budget_is_read_with_its_unit(text: str, seconds: float | None) -> None:
    if seconds is None:
        with pytest.raises(UsageError):
            parse_budget(text)
    else:
        assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "m", "0m", "-5m", "5 m", "5x", "infs", "30m1h"])
def test_what_is_no_time_is_an_error(text: str) -> None:
    with pytest.raises(UsageError, match="a time with its unit is needed, as in 30m or 1h30m"):
        parse_budget(text)
