"""How much of a model was compared."""

from typing import Any

import pytest

from assay.judge.coverage import (
    ComparedStages,
    CoverageParts,
    Usage,
    describe_coverage,
    judge_coverage,
    notes_on_coverage,
)
from assay.judge.explain import DecidingRows, explain_verdict
from assay.judge.results import ReplayResults
from assay.stages import Stage
from assay.verdicts import Coverage, Level, Outcome, Verdict, find_contradiction, is_part_of

PATHS = ("embed", "layers.0", "visual.blocks.0", "visual.blocks.1", "visual.merger", "head")


def usage(*ran: str, paths: tuple[str, ...] = PATHS, **other: Any) -> Usage:
    return Usage(
        parameters={path: [f"{path}.weight"] for path in paths},
        called=sorted(ran),
        **{"read": [f"{path}.weight" for path in ran]} | other,
    )


FULL = usage(*PATHS)
TEXT = usage("embed", "layers.0", "head")


def coverage(reference: Usage = FULL, candidate: Usage | None = FULL, **parts: Any) -> Coverage:
    return judge_coverage(CoverageParts(reference, candidate, **parts))


def test_all_that_ran_is_covered() -> None:
    found = coverage()

    assert (found.gaps, found.outcome) == ([], Outcome.PASS)
    assert describe_coverage(found) == "coverage: all 6 modules with parameters ran"


def test_a_module_for_another_use_need_not_run() -> None:
    ran = usage("embed", "layers.0", "head", other_uses={"visual.merger.weight": "by no code"})

    found = coverage(ran, TEXT)

    assert found.not_run == ["visual.blocks.0", "visual.blocks.1"]
    assert describe_coverage(found).endswith("read by no code: visual.merger.weight")


def test_what_never_ran_is_named_by_its_topmost_module() -> None:
    found = coverage(TEXT, TEXT)

    assert found.not_run == ["visual.blocks.0", "visual.blocks.1", "visual.merger"]
    assert found.not_run_parts == {"visual": 3}
    assert (found.modules_run, found.modules, found.outcome) == (3, 6, Outcome.NOT_COMPARED)
    assert describe_coverage(found) == (
        "coverage: 3 of 6 modules with parameters ran; never ran: visual (3 modules);"
        " --allow-unused GLOB passes without them"
    )


def test_a_parameter_for_another_use_is_told_and_is_no_gap() -> None:
    uses = {
        "head.weight": "in training",
        "embed.weight": "in training",
        "layers.0.weight": "with a",
    }
    reference = usage(*PATHS, read=["layers.0.weight"], other_uses=uses)

    found = coverage(reference)

    assert found.other_uses == {"head.weight": "in training", "embed.weight": "in training"}
    assert "visual.merger.weight" in found.unused_parameters
    assert not {*uses} & {*found.gaps}
    assert describe_coverage(found).endswith("read only in training: head.weight, embed.weight")


def test_parameters_of_the_whole_model_are_a_part() -> None:
    paths = (*PATHS, "")
    reference = usage(*PATHS, paths=paths)

    assert coverage(reference, reference).not_run_parts == {"": 1}


def test_what_code_outside_of_recorded_modules_reads_is_covered() -> None:
    # The generation of BLIP-2 calls its parts and not the model, which owns the queries.
    reference = usage(*PATHS, paths=(*PATHS, ""), read=[".weight"])

    found = coverage(reference, reference, stages=stages(*PATHS, recorded=PATHS))

    assert (found.not_run_parts, found.modules_run) == ({}, 7)
    replaced = stages(recorded=PATHS, replaced=PATHS)
    assert coverage(reference, reference, stages=replaced).modules_run == 1


def test_a_part_of_which_something_ran_is_named_by_what_did_not() -> None:
    ran = usage("embed", "layers.0", "head", "visual.merger")

    assert coverage(ran, ran).not_run_parts == {"visual.blocks": 2}


@pytest.mark.parametrize("glob", ["visual", "vis*", "visual.*", "*", "visual.[bm]*"])
def test_globs_allow_what_they_match_and_what_lies_in_it(glob: str) -> None:
    found = coverage(TEXT, TEXT, allowed=[glob])

    assert (found.outcome, found.forbidden_gaps) == (Outcome.PASS, [])
    assert len(found.gaps) == 3
    (note,) = notes_on_coverage(found)
    assert note == "not compared, as --allow-unused allows: never ran: visual (3 modules)"


@pytest.mark.parametrize("glob", ["visual.blocks", "isual", "head", "visual.blocks.1.weight"])
def test_other_globs_leave_it_forbidden(glob: str) -> None:
    assert coverage(TEXT, TEXT, allowed=[glob]).outcome is Outcome.NOT_COMPARED


def test_a_glob_that_covers_nothing_is_told() -> None:
    mistyped, compared = notes_on_coverage(coverage(allowed=["visaul*", "head.weight"]))

    assert mistyped == (
        "--allow-unused visaul* covers nothing: the model has no such name; the nearest are visual"
    )
    assert compared.endswith("all parts that it matches were compared, or it matches none")


def test_modules_whose_parameters_other_code_reads_ran() -> None:
    read = Usage(parameters=FULL.parameters, called=["embed"], read=list(FULL.read or ()))

    assert coverage(read, read).gaps == []


def test_parameters_of_modules_that_ran_may_be_unread() -> None:
    unread = usage(*PATHS, read=[f"{path}.weight" for path in PATHS[1:]])

    found = coverage(unread, unread)

    assert (found.not_run, found.unused_parameters) == ([], ["embed.weight"])
    assert found.outcome is Outcome.NOT_COMPARED
    assert coverage(unread, unread, allowed=["embed.weight"]).outcome is Outcome.PASS


def test_trained_parameters_without_gradient_are_unused() -> None:
    assert coverage(untouched=["head.weight"]).unused_parameters == ["head.weight"]
    # What never ran is named once.
    assert coverage(TEXT, TEXT, untouched=["visual.merger.weight"]).unused_parameters == []


def test_experts_without_a_token_are_named_and_can_be_allowed() -> None:
    routed = usage(*PATHS, experts={"layers.0.experts": [4, 0, 2]})

    found = coverage(routed, routed)

    assert found.unrouted_experts == ["layers.0.experts.1"]
    assert found.outcome is Outcome.NOT_COMPARED
    assert "experts without a token: layers.0.experts.1" in describe_coverage(found)
    for glob in ("layers.0.experts", "layers.*.experts.1"):
        assert coverage(routed, routed, allowed=[glob]).outcome is Outcome.PASS


def test_an_expert_that_is_a_module_is_named_once() -> None:
    paths = (*PATHS, "moe.0.up", "moe.1.up")
    routed = usage(*PATHS, "moe.0.up", paths=paths, experts={"moe": [4, 0]})

    found = coverage(routed, routed)

    assert found.gaps == ["moe.1"]


def test_modules_that_only_the_candidate_has_must_run() -> None:
    candidate = usage(*PATHS, paths=(*PATHS, "layers.0.lora_A", "layers.0.lora_B"))

    found = coverage(FULL, candidate)

    assert found.not_run == ["layers.0.lora_A", "layers.0.lora_B"]
    assert (found.modules_run, found.candidate_modules_run, found.candidate_modules) == (6, 6, 8)
    assert "(on the candidate 6 of 8)" in describe_coverage(found)


def test_a_candidate_that_could_not_be_watched_is_said_to_be() -> None:
    assert "(the candidate's were not watched)" in describe_coverage(coverage(FULL, None))


def stages(*compared: str, recorded: tuple[str, ...], replaced: tuple[str, ...] = ()) -> Any:
    return ComparedStages(frozenset(recorded), frozenset(compared), frozenset(replaced))


def test_what_ran_and_was_not_compared_is_not_covered() -> None:
    recorded = ("", *PATHS)

    assert coverage(stages=stages("", *PATHS[1:], recorded=recorded)).not_run == ["embed"]
    # Other code computes what it does, as a part of the model around it.
    of_ancestor = stages("", *PATHS[1:], recorded=recorded, replaced=("embed",))
    assert coverage(stages=of_ancestor).not_run == []
    # Inside of a group of experts nothing is recorded: the group is compared.
    assert coverage(stages=stages("", *PATHS[1:], recorded=("", *PATHS[1:]))).not_run == []


def test_a_stage_without_a_compared_value_is_recorded_and_not_compared() -> None:
    results = ReplayResults()
    for module in ("embed", "head"):
        results.at(module, "output", Stage(module), "float32", "Linear")
    results.ports["head", "output"].exact.num_compared = 1

    found = ComparedStages.of(results, [results])

    assert (found.recorded, found.compared) == (frozenset({"embed", "head"}), frozenset({"head"}))


def test_ranks_cover_a_model_together() -> None:
    first, second = usage("embed"), usage("layers.0", "head")

    both = Usage.of_ranks([first, second])

    assert [path for path in PATHS if both.runs(path)] == ["embed", "layers.0", "head"]


def test_minor_gaps_are_told_and_forbid_nothing() -> None:
    used = usage(*PATHS, equal_rows=["rotary.position_ids"], cache_slots=9, cache_slots_read=7)

    found = coverage(used, used)

    assert found.outcome is Outcome.PASS
    assert describe_coverage(found).endswith(
        "the rows of position_ids never differed; cache slots never read: 2 of 9 (written by the last call"
        " of each text)"
    )


def test_the_first_line_of_a_pass_says_that_a_part_did_not_run() -> None:
    level = Level(verdict=Outcome.PASS, compared=3)
    verdict = Verdict(verdict=Outcome.PASS, levels={"modules": level}, compared=3)
    full = verdict.model_copy(update={"coverage": coverage()})
    part = verdict.model_copy(update={"coverage": coverage(TEXT, TEXT, allowed=["visual"])})

    assert explain_verdict(full, DecidingRows()).headline == (
        "The candidate agrees with the reference."
    )
    explanation = explain_verdict(part, DecidingRows())
    assert explanation.headline == (
        "What ran of the model agrees with the reference; never ran: visual (3 modules)."
    )
    assert any(line.startswith("coverage: 3 of 6 modules") for line in explanation.details)


def test_a_verdict_that_passes_over_a_gap_contradicts_itself() -> None:
    levels = {"modules": Level(verdict=Outcome.PASS, compared=3)}
    verdict = Verdict(verdict=Outcome.PASS, levels=levels, compared=3)
    forbidden = verdict.model_copy(update={"coverage": coverage(TEXT, TEXT)})
    allowed = verdict.model_copy(update={"coverage": coverage(TEXT, TEXT, allowed=["visual"])})

    assert find_contradiction(forbidden) == (
        "the verdict is PASS, and visual.blocks.0 was not compared"
    )
    assert find_contradiction(allowed) is None


@pytest.mark.parametrize(
    ("name", "glob", "expected"),
    [
        ("model.visual.fc", "model.visual", True),
        ("model.visuals.fc", "model.visual", False),
        ("a.experts.3", "a.experts.[34]", True),
        ("lm_head", "LM_HEAD", False),
    ],
)
def test_globs_match_paths_and_what_is_in_them(name: str, glob: str, *, expected: bool) -> None:
    assert is_part_of(name, glob) is expected
