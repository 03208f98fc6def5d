"""Rules as data: what they refuse, whether their citations exist, and the pairs that plans cover."""

import ast
import re
import tomllib
from collections.abc import Iterable, Mapping
from itertools import combinations, product
from pathlib import Path
from typing import get_args

import pytest

import assay_smoke.matrix
from assay.errors import UsageError
from assay_smoke.matrix.rules import (
    AXES,
    CARDS,
    RULES,
    Case,
    Framework,
    Rule,
    SmokePlan,
    case_of,
    check_compatible,
    covered_pairs,
    plan_smoke,
    refusing,
    require_vendor,
    rules_for,
    rules_of_vendor,
    vendor_names,
)
from packages.smoke.tests.documented_tables import with_tables

ROOT = Path(__file__).parents[5]


@pytest.mark.parametrize(
    "case_id",
    [
        "one-process-1", "one-process-1-float16-lora-compile-packed-merged", "ddp-8-compile",
        "fsdp-2-lora-offload", "fsdp-8-mixtral-float16-offload-recompute-compile-packed",
        "tensor-parallel-4-mistral-bfloat16-lora-adapter", "pipeline-4-mixtral-hugging-face",
        "zero1-1-offload", "zero3-8-gemma2-float16-lora-offload-accumulation-merged-sigterm",
    ],
)  # fmt: skip
def test_what_can_be_run_is_not_refused(case_id: str) -> None:
    assert check_compatible(case_of(case_id)) is None


@pytest.mark.parametrize(
    ("case_id", "rule"),
    [
        ("one-process-2", "one-process-one-card"),
        ("ddp-1", "one-card-is-one-process"),
        ("tensor-parallel-1", "one-card-is-one-process"),
        ("pipeline-1", "one-card-is-one-process"),
        ("fsdp-1", "fsdp-one-card"),
        ("tensor-parallel-8", "tensor-parallel-heads-8"),
        ("pipeline-8", "pipeline-layers-8"),
        ("pipeline-2-gemma2", "pipeline-tied-head"),
        ("tensor-parallel-2-gemma2", "tensor-parallel-gemma2"),
        ("pipeline-2-recompute", "pipeline-recompute"),
        ("one-process-1-offload", "offload-replicated"),
        ("ddp-2-offload", "offload-replicated"),
        ("tensor-parallel-2-offload", "offload-divided"),
        ("pipeline-2-float16", "float16-divided"),
        ("zero2-2-compile", "compile"),
        ("tensor-parallel-2-packed", "packed"),
        ("fsdp-2-adapter", "adapter-without-lora"),
        ("fsdp-2-merged", "adapter-without-lora"),
        ("fsdp-2-lora-hugging-face", "whole-model-with-lora"),
        ("zero1-2-full", "full-of-shards"),
        ("ddp-2-sharded", "shards-of-replicas"),
    ],
)
def test_what_cannot_be_run_is_refused_with_its_reason(case_id: str, rule: str) -> None:
    (expected,) = [one.reason for one in RULES if one.name == rule]
    assert check_compatible(case_of(case_id)) == expected


def test_every_rule_is_the_only_one_against_some_case() -> None:
    needed = set()
    for values in product(*(axis.values for axis in AXES)):
        words = dict(zip((axis.name for axis in AXES), values, strict=True))
        applied = [rule.name for rule in RULES if rule.applies(words)]
        if len(applied) == 1:
            needed.update(applied)
    assert len(RULES) > 10
    assert needed == {rule.name for rule in RULES}


def test_a_reason_is_one_sentence_and_a_name_is_used_once() -> None:
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names) > 10
    assert [rule.name for rule in RULES if not re.fullmatch(r"[A-Z].*[^.]\.", rule.reason)] == []


def all_rules() -> dict[str, Rule]:
    return {rule.name: rule for vendor in vendor_names() for rule in rules_for(vendor)}


@pytest.mark.parametrize("name", all_rules())
def test_what_shows_a_rule_is_there(name: str) -> None:
    shown_by = all_rules()[name].shown_by
    if shown_by.startswith("https://"):
        assert re.fullmatch(r"https://\S+", shown_by)
        return
    path, _, test = shown_by.partition("::")
    source = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert test in {node.name for node in source.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("words", [{"cards": "3"}, {"speed": "fast"}, {"family": []}])
def test_a_rule_that_would_refuse_nothing_is_an_error(words: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"^rule planted: "):
        refusing(name="planted", reason="None.", shown_by="", **words)


def test_every_vendor_of_the_runners_has_a_table() -> None:
    runners = tomllib.loads((ROOT / "runners/runners.toml").read_text(encoding="utf-8"))
    assert set(runners) <= set(vendor_names())


def test_what_a_vendor_lacks_is_refused_there_only() -> None:
    case = case_of("zero2-2")
    refused_at = [vendor for vendor in vendor_names() if check_compatible(case, rules_for(vendor))]
    assert refused_at == ["spyre", "trainium", "apple"]


def test_an_unknown_vendor_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(UsageError, match=r"^--vendor nvida: there is cpu, nvidia, amd, "):
        require_vendor("nvida")


@pytest.mark.parametrize(("name", "vendor"), [("amd", "amd"), ("rocm", "amd"), ("trn", "trainium")])
def test_a_vendor_has_several_names(name: str, vendor: str) -> None:
    assert require_vendor(name) == vendor


def test_a_device_without_a_table_has_the_common_rules() -> None:
    assert rules_for("sim") == RULES


def test_a_rule_applies_to_cases_with_one_of_its_words_on_each_axis() -> None:
    rule = refusing(
        name="planted",
        framework=["ddp", "fsdp"],
        lora="lora",
        recompute="no",
        family=["llama", "mistral", "gemma2", "mixtral"],
        reason="None.",
        shown_by="",
    )
    assert rule.applies(case_of("ddp-2-lora").words)
    assert not rule.applies(case_of("ddp-2-lora-recompute").words)


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
    plan = plan_smoke(vendor=vendor, cards=cards)
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


def test_a_host_has_every_pair_in_few_cases_on_four_cards() -> None:
    plan = plan_smoke()
    assert plan.pairs.covered == plan.pairs.possible > 500
    assert len(plan.cases) < 50


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
        for planned in plan_smoke(vendor=vendor, cards=cards).cases
    }
    assert [case_id for case_id in listed if case_id not in used] == []


def test_coverage_one_has_each_framework_once() -> None:
    plan = plan_smoke(coverage="one")
    cases = planned_cases(plan)
    assert sorted(case.framework for case in cases) == sorted(get_args(Framework))
    assert plan.pairs.covered == len(pairs_in(case.words for case in cases)) > 300
    assert len(plan.pairs.uncovered) == plan.pairs.possible - plan.pairs.covered


def test_full_coverage_has_every_compatible_case(compatible: list[dict[str, str]]) -> None:
    cases = planned_cases(plan_smoke(coverage="full", cards=1))
    expected = [words for words in compatible if words["cards"] == "1"]
    assert len(cases) == len(expected) > 1000
    assert {case.id for case in cases if check_compatible(case)} == set()
    assert {tuple(case.words.items()) for case in cases} == {
        tuple(words.items()) for words in expected
    }


DOCUMENT = ROOT / "docs" / "smoke.md"


def test_the_tables_of_the_document_are_those_of_the_code() -> None:
    # Written anew by: python packages/smoke/tests/documented_tables.py docs/smoke.md
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == with_tables(text)


def test_a_table_that_was_changed_by_hand_is_found() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    planted = text.replace("number of ranks, each on its own card", "number of ranks")
    assert planted != text
    assert with_tables(planted) == text


def test_a_document_without_a_place_is_an_error() -> None:
    with pytest.raises(ValueError, match="no marks for 'numbers'"):
        with_tables("# Nothing\n")
