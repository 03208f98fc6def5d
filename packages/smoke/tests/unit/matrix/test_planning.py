"""Plans: what a plan says, and expressions."""

from math import comb
from typing import Any

import pytest

from assay.errors import UsageError
from assay_smoke.commands import plan as plan_cases
from assay_smoke.matrix.rules import (
    AXES,
    RULES,
    SmokePlan,
    case_of,
    choose_cases,
    compile_expression,
    plan_smoke,
)


def ids(one: SmokePlan) -> list[str]:
    return [case.id for case in one.cases]


def test_a_plan_says_of_each_case_what_it_adds_and_how_to_repeat_it() -> None:
    first = plan_smoke().cases[0]
    assert first.command == f"assay smoke run {first.id}"
    assert case_of(first.id) == first.case
    assert first.new_pairs == comb(len(AXES), 2)


def test_a_plan_has_the_order_of_the_table() -> None:
    assert [case.case for case in plan_smoke().cases] == choose_cases("pairwise", 4, RULES)


def test_new_pairs_add_up_to_what_is_covered() -> None:
    for coverage in ("one", "pairwise"):
        one = plan_smoke(coverage=coverage)
        assert sum(case.new_pairs for case in one.cases) == one.pairs.covered


def test_what_a_vendor_lacks_is_not_planned() -> None:
    frameworks = {case.case.framework for case in plan_smoke("trainium").cases}
    assert frameworks == {"one-process", "ddp", "fsdp", "tensor-parallel", "pipeline"}


def test_an_expression_chooses_ids() -> None:
    one = plan_smoke(expression="fsdp and not lora")
    assert ids(one)
    assert all("fsdp" in case_id and "lora" not in case_id for case_id in ids(one))
    assert one.pairs.possible == plan_smoke().pairs.possible > one.pairs.covered


@pytest.mark.parametrize(
    ("expression", "elsewhere"),
    [("fsdp-2-lora-offload-recompute-compile-packed-merged", "of all compatible cases match"),
     ("warp", "no compatible case matches")],
)  # fmt: skip
def test_an_expression_that_matches_nothing_is_an_error(expression: str, elsewhere: str) -> None:
    with pytest.raises(UsageError, match=elsewhere):
        plan_smoke(expression=expression)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"cards": 0}, "--cards 0: "), ({"expression": "fsdp and"}, "-k 'fsdp and': ")],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        plan_smoke(**options)
    assert str(raised.value).startswith(message)


def test_the_command_refuses_an_unknown_vendor() -> None:
    with pytest.raises(UsageError, match=r"^--vendor nvidai: there is cpu, nvidia"):
        plan_cases(vendor="nvidai")


def test_a_vendor_without_known_limits_is_noted() -> None:
    nothing = "no limits of amd cards are known: no rule excludes any case"
    assert plan_smoke("amd").notes == [nothing]
    assert plan_smoke("trainium").notes == plan_smoke("cpu").notes == []


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
    "expression",
    ["", "lora and", "and lora", "(lora", "lora)", "lora ddp", "lora & ddp", "lora ()"],
)
def test_what_cannot_be_read_is_refused(expression: str) -> None:
    with pytest.raises(UsageError) as raised:
        compile_expression(expression)
    assert str(raised.value).startswith(f"-k {expression!r}: write words of an id with and, or")
