"""Coverage of plans, counted from all combinations."""

import tomllib
from collections.abc import Iterable, Mapping
from itertools import combinations, product
from pathlib import Path
from typing import get_args

import pytest

import assay_smoke.matrix
from assay_smoke.matrix.cases import AXES, CARDS, Case, Framework, case_of
from assay_smoke.matrix.coverage import covered_pairs
from assay_smoke.matrix.planning import PlanOptions, SmokePlan, plan_smoke
from assay_smoke.matrix.rules import RULES, check_compatible, rules_of_vendor, vendor_names

Pairs = set[tuple[tuple[str, str], tuple[str, str]]]
TABLE = Path(assay_smoke.matrix.__file__).with_name("cases.toml")


@pytest.fixture(scope="module")
def compatible() -> list[dict[str, str]]:
    """Return the words of every case that no rule for all vendors refuses."""
    names = [axis.name for axis in AXES]
    cases = (
        dict(zip(names, values, strict=True)) for values in product(*(axis.values for axis in AXES))
    )
    return [words for words in cases if not any(rule.applies(words) for rule in RULES)]


def pairs_in(cases: Iterable[Mapping[str, str]]) -> Pairs:
    """Return the pairs of words. It works axis by axis, which is fast for many cases."""
    chosen = list(cases)
    return {
        ((one, first), (other, second))
        for one, other in combinations((axis.name for axis in AXES), 2)
        for first, second in {(words[one], words[other]) for words in chosen}
    }


def planned_cases(plan: SmokePlan) -> list[Case]:
    return [planned.case for planned in plan.cases]


@pytest.mark.parametrize("cards", CARDS)
@pytest.mark.parametrize("vendor", ["cpu", "trainium", "apple"])
def test_every_pair_of_compatible_words_is_in_a_case_of_the_pairwise_plan(
    vendor: str, cards: int, compatible: list[dict[str, str]]
) -> None:
    rules = rules_of_vendor(vendor)
    possible = pairs_in(
        words
        for words in compatible
        if int(words["cards"]) <= cards and not any(rule.applies(words) for rule in rules)
    )
    plan = plan_smoke(PlanOptions(vendor=vendor, cards=cards))
    cases = planned_cases(plan)
    assert pairs_in(case.words for case in cases) == possible
    assert (plan.pairs.covered, plan.pairs.possible) == (len(possible), len(possible))
    assert plan.pairs.uncovered == []
    needless = [case.id for case in cases if covered_pairs({*cases} - {case}) >= possible]
    assert needless == []


def test_the_vendors_above_have_all_different_rules() -> None:
    def refused(vendor: str) -> list[Mapping[str, frozenset[str]]]:
        return [rule.refuses for rule in rules_of_vendor(vendor)]

    known = [refused(vendor) for vendor in ("cpu", "trainium", "apple")]
    assert [vendor for vendor in vendor_names() if refused(vendor) not in known] == []


def test_a_host_has_38_cases_with_575_pairs_on_four_cards() -> None:
    plan = plan_smoke(PlanOptions())
    assert (len(plan.cases), plan.pairs.covered) == (38, 575)


def test_every_listed_case_is_possible_and_stands_once() -> None:
    for ids in tomllib.loads(TABLE.read_text(encoding="utf-8")).values():
        assert len(set(ids)) == len(ids)
        assert [case_id for case_id in ids if check_compatible(case_of(case_id))] == []


def test_every_listed_case_is_used_on_some_machine() -> None:
    listed = tomllib.loads(TABLE.read_text(encoding="utf-8"))["pairwise"]
    used = {
        planned.id
        for vendor in ("cpu", "trainium")
        for cards in CARDS
        for planned in plan_smoke(PlanOptions(vendor=vendor, cards=cards)).cases
    }
    assert [case_id for case_id in listed if case_id not in used] == []


def test_coverage_one_has_each_framework_once() -> None:
    plan = plan_smoke(PlanOptions(coverage="one"))
    cases = planned_cases(plan)
    assert sorted(case.framework for case in cases) == sorted(get_args(Framework))
    assert plan.pairs.covered == len(pairs_in(case.words for case in cases)) > 300
    assert len(plan.pairs.uncovered) == plan.pairs.possible - plan.pairs.covered


def test_full_coverage_has_every_compatible_case(compatible: list[dict[str, str]]) -> None:
    cases = planned_cases(plan_smoke(PlanOptions(coverage="full", cards=1)))
    expected = [words for words in compatible if words["cards"] == "1"]
    assert len(cases) == len(expected) > 1000
    assert {case.id for case in cases if check_compatible(case)} == set()
    assert {tuple(case.words.items()) for case in cases} == {
        tuple(words.items()) for words in expected
    }
