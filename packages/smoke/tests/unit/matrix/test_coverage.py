"""Coverage of plans, counted from all combinations without either search."""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay_smoke.matrix.cases import AXES, FEATURES, NAMES, Case, Framework, axes_for
from assay_smoke.matrix.coverage import Matrix, choose_cases, covered_pairs, pair_in_words
from assay_smoke.matrix.planning import PlanOptions, SmokePlan, plan_smoke
from assay_smoke.matrix.rules import RULES, Rule, check_compatible, refusing

Pairs = set[tuple[tuple[str, str], tuple[str, str]]]


@pytest.fixture(scope="module")
def possible() -> Pairs:
    """Return the pairs of words of all cases on 1, 2 or 4 cards, by brute force."""
    words = {axis.name: axis.values for axis in AXES} | {"cards": ("1", "2", "4")}
    found: Pairs = set()
    for values in product(*words.values()):
        case = dict(zip(words, values, strict=True))
        if not any(all(case[axis] in w for axis, w in rule.refuses.items()) for rule in RULES):
            found.update(combinations(case.items(), 2))
    return found


@pytest.fixture(scope="module")
def pairwise() -> SmokePlan:
    return plan_smoke(PlanOptions(cards=4))


def words_of(case: Case) -> dict[str, str]:
    """Return the words by axis, derived from the fields of the plan's JSON."""
    fields: dict[str, Any] = case.model_dump(mode="json")
    features = fields.pop("features")
    words = {name: str(value) for name, value in fields.items()}
    words |= {name: name if name in features else "no" for name in FEATURES}
    return {name: words[name] for name in NAMES}


def pairs_in(cases: Iterable[Case]) -> Pairs:
    return {pair for case in cases for pair in combinations(words_of(case).items(), 2)}


def test_every_pair_that_can_stand_together_is_in_the_pairwise_plan(
    pairwise: SmokePlan, possible: Pairs
) -> None:
    assert len(possible) > 500
    assert pairs_in(planned.case for planned in pairwise.cases) == possible
    assert (pairwise.pairs.covered, pairwise.pairs.possible) == (len(possible), len(possible))
    assert pairwise.pairs.uncovered == []


def test_every_planned_case_can_be_run_and_stands_once(pairwise: SmokePlan) -> None:
    cases = [planned.case for planned in pairwise.cases]
    assert len(set(cases)) == len(cases) > 30
    assert [case.id for case in cases if check_compatible(case)] == []


def test_the_pairwise_plan_is_small(pairwise: SmokePlan) -> None:
    # 45 cases of 12 s and some time to start are 12 minutes.
    assert len(pairwise.cases) <= 45


def test_no_case_of_the_pairwise_plan_is_needless(pairwise: SmokePlan, possible: Pairs) -> None:
    cases = [planned.case for planned in pairwise.cases]
    needless = [
        case.id for case in cases if pairs_in(other for other in cases if other != case) >= possible
    ]
    assert needless == []


def test_a_case_that_is_lost_is_seen_in_the_count(pairwise: SmokePlan, possible: Pairs) -> None:
    cases = [planned.case for planned in pairwise.cases]
    kept = pairs_in(cases[1:])
    assert len(kept) < len(possible)


def test_coverage_one_has_each_framework_once() -> None:
    plan = plan_smoke(PlanOptions(coverage="one"))
    assert sorted(planned.case.framework for planned in plan.cases) == sorted(get_args(Framework))
    covered = pairs_in(planned.case for planned in plan.cases)
    assert plan.pairs.covered == len(covered) > 300
    assert len(plan.pairs.uncovered) == plan.pairs.possible - plan.pairs.covered


def test_full_coverage_has_every_compatible_case_of_one_card() -> None:
    cases = [planned.case for planned in plan_smoke(PlanOptions(coverage="full", cards=1)).cases]
    words = {axis.name: axis.values for axis in AXES} | {"cards": ("1",)}
    num_compatible = sum(
        not any(rule.applies(values) for rule in RULES) for values in product(*words.values())
    )
    assert len(set(cases)) == len(cases) == num_compatible > 1000
    assert [case.id for case in cases[::50] if check_compatible(case)] == []


# A few axes of few words, so that every set of rules can be compared with all combinations.
_SMALL = tuple(axis for axis in AXES if axis.name in ("framework", "cards", "family", "precision"))
_rules = st.lists(
    st.dictionaries(
        st.sampled_from([axis.name for axis in _SMALL]),
        st.integers(0, 3).map(lambda number: [number, number + 1]),
        min_size=1,
        max_size=3,
    ),
    max_size=6,
)


def planted_rules(drawn: list[dict[str, list[int]]]) -> list[Rule]:
    values = {axis.name: axis.values for axis in _SMALL}
    return [
        refusing(
            name=f"planted-{number}",
            reason="Planted.",
            shown_by="",
            **{a: {values[a][n % len(values[a])] for n in ns} for a, ns in refuses.items()},
        )
        for number, refuses in enumerate(drawn)
    ]


@given(_rules)
@settings(max_examples=40, deadline=None)
def test_pairs_are_those_of_all_combinations_for_any_rules(
    drawn: list[dict[str, list[int]]],
) -> None:
    rules = planted_rules(drawn)
    matrix = Matrix(_SMALL, rules)
    compatible = [
        values
        for values in product(*(axis.values for axis in _SMALL))
        if not any(rule.applies(values) for rule in rules)
    ]
    assert list(matrix.cases()) == compatible
    expected = {pair for values in compatible for pair in combinations(enumerate(values), 2)}
    assert matrix.pairs == expected
    if compatible:
        assert covered_pairs(choose_cases(matrix, "pairwise")) == expected
        assert set(choose_cases(matrix, "pairwise")) <= set(compatible)


def test_a_refused_pair_names_the_rules_that_leave_none() -> None:
    matrix = Matrix(axes_for(4), RULES)
    named = {
        pair_in_words(pair): [rule.name for rule in rules]
        for pair, rules in matrix.refused_pairs.items()
    }
    assert named["framework pipeline + recompute"] == ["pipeline-recompute"]
    assert named["offload + checkpoint full"] == ["offload-replicated", "full-of-shards"]
    assert set(matrix.refused_pairs).isdisjoint(matrix.pairs)
    by_axes = combinations([len(axis.values) for axis in matrix.axes], 2)
    assert len(matrix.refused_pairs) + len(matrix.pairs) == sum(a * b for a, b in by_axes)
