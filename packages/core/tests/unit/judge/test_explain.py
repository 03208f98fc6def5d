"""The messages of verdicts, whole, and the rows that a verdict rests on."""

import math
from typing import Any

import pytest

from assay.foreign_text import one_line
from assay.judge.explain import (
    DecidingRows,
    describe_resolution,
    explain_verdict,
    find_deciding_rows,
    over_limit,
    severity,
)
from assay.judge.wording import describe_judged
from assay.sites import Phase
from assay.verdicts import (
    Level,
    Location,
    Measurement,
    Outcome,
    Suspect,
    TokenPosition,
    Unmatched,
    Verdict,
)

DOWN_PROJ = "model.layers.3.mlp.down_proj"


def failed_verdict(**changes: Any) -> Verdict:
    facts: dict[str, Any] = {
        "verdict": Outcome.FAIL,
        "model": {"name": "micro:llama"},
        "reference": {"run": "cpu/float32"},
        "candidate": {"run": "cpu/bfloat16"},
        "levels": {
            "modules": Level.model_validate({
                "verdict": "FAIL",
                "compared": 60,
                "limits_origin": "calibrated on 312 clean runs",
                "worst_element": {
                    "prompt": 1, "position": 17, "channel": 902, "actual": 3.14, "expected": 2.97,
                },
            })
        },
        "location": Location(phase="forward", module=DOWN_PROJ),
        "diagnosis": "module-error",
        "noise_ratio": 14.6,
        "limit": 3.0,
        "statistic": "replay-tensor",
        "compared": 60,
    }  # fmt: skip
    return Verdict(**{**facts, **changes})


def measured(**changes: Any) -> Measurement:
    facts: dict[str, Any] = {
        "level": "modules",
        "module": DOWN_PROJ,
        "port": "output",
        "statistic": "replay-tensor",
        "actual": 0.041,
        "expected": 0.0028,
        "ratio": 14.6,
        "limit": 3.0,
    }
    return Measurement(**{**facts, **changes})


TOKEN = measured(statistic="token", ratio=21.3, limit=None, prompt=1, position=17)


def message(verdict: Verdict, *rows: Measurement) -> str:
    return explain_verdict(verdict, find_deciding_rows(verdict, rows)).message


def test_a_module_error_is_reported_whole() -> None:
    verdict = failed_verdict(
        location=Location(phase="forward", module=DOWN_PROJ, rank=2),
        first_bad_token=TokenPosition(prompt=0, position=3, phase="decode"),
    )
    assert message(verdict, measured(), TOKEN) == (
        "model.layers.3.mlp.down_proj (forward, step 0, rank 2) differs from the reference.\n"
        "  relative error 4.1e-2 = 14.6x the bfloat16 noise of the same module "
        "(limit 3.0x, calibrated on 312 clean runs)\n"
        "  worst row: prompt 1, token 17, error 4.1e-2 = 21.3x its noise; "
        "worst element (prompt 1, token 17, channel 902): actual 3.14, expected 2.97\n"
        "  first token affected: prompt 0, position 3 (decode)\n"
        "  its inputs agree (they are the reference's own): the error is made here\n"
        "  diagnosis module-error: one module computes something else from the same inputs\n"
        "Next: assay explain module-error"
    )


def test_a_failure_without_any_measurement_still_names_place_ratio_and_limit() -> None:
    verdict = failed_verdict(levels={})
    assert message(verdict) == (
        "model.layers.3.mlp.down_proj (forward, step 0) differs from the reference.\n"
        "  relative error = 14.6x the bfloat16 noise of the same place (limit 3.0x)\n"
        "  its inputs agree (they are the reference's own): the error is made here\n"
        "  diagnosis module-error: one module computes something else from the same inputs\n"
        "Next: assay explain module-error"
    )


def test_an_error_is_printed_only_beside_the_ratio_that_was_judged() -> None:
    verdict = failed_verdict(levels={})
    other = measured(actual=0.9, ratio=320.0)
    assert "relative error = 14.6x" in message(verdict, other)


def test_wrong_inputs_are_not_attributed_to_a_module() -> None:
    verdict = failed_verdict(
        levels={},
        location=Location(phase="inputs", step=3),
        diagnosis="inputs-differ",
        statistic="exact",
        noise_ratio=math.inf,
        limit=0.0,
    )
    row = measured(
        module="", port="input.position_ids", phase="inputs", step=3, statistic="exact",
        actual=5.0, expected=0.0, ratio=math.inf, limit=0.0,
    )  # fmt: skip
    assert message(verdict, row) == (
        "The inputs of the model (inputs, step 3) differ from the reference.\n"
        "  values that must be equal (integers, indices, masks) differ, at input.position_ids\n"
        "  no module has run yet: the error is made by the loop around the model\n"
        "  diagnosis inputs-differ: inputs or labels are not those of the reference\n"
        "Next: assay explain inputs-differ"
    )


def test_nan_is_a_failure_that_no_noise_explains() -> None:
    verdict = failed_verdict(diagnosis="non-finite", noise_ratio=math.nan)
    row = measured(actual=math.nan, ratio=math.nan)
    assert message(verdict, row).splitlines()[1] == (
        "  relative error nan: no noise explains it "
        "(ratio nan, limit 3.0x, calibrated on 312 clean runs)"
    )


def test_a_row_of_nan_is_recognised_by_its_error() -> None:
    row = measured(statistic="token", actual=math.nan, ratio=math.nan, prompt=1, position=17)
    verdict = failed_verdict(levels={})
    assert message(verdict, row).splitlines()[2] == "  worst row: prompt 1, token 17, error nan"


def test_non_finite_values_are_named_without_a_ratio() -> None:
    verdict = failed_verdict(statistic="non-finite", noise_ratio=math.inf, limit=0.0, levels={})
    row = measured(statistic="non-finite", actual=math.nan, expected=0.0, ratio=math.inf, limit=0.0)
    assert message(verdict, row).splitlines()[1] == (
        "  NaN or infinity where the reference is finite, at output"
    )


def test_values_of_the_worst_element_are_distinguished() -> None:
    element = {"prompt": -1, "position": -1, "channel": 0, "actual": 1.00001, "expected": 1.0}
    level = Level.model_validate({"verdict": "FAIL", "worst_element": element})
    assert message(failed_verdict(levels={"modules": level})).splitlines()[2] == (
        "  worst element (channel 0): actual 1.00001, expected 1.0"
    )


def test_a_ratio_of_what_must_be_exact_has_no_noise_unit() -> None:
    assert describe_judged(math.inf, 0.0) == "not equal"
    assert describe_judged(0.0, 0.0) == "equal"
    assert describe_judged(math.nan, 3.0) == "nan / 3.0x"
    assert describe_judged(14.62, 3.0) == "14.6x / 3.0x"


def test_a_named_operation_is_not_looked_for_again() -> None:
    location = Location(phase="forward", module=DOWN_PROJ, op="linear")
    lines = message(failed_verdict(location=location), measured()).splitlines()
    assert lines[0] == (
        "model.layers.3.mlp.down_proj, operation linear (forward, step 0) "
        "differs from the reference."
    )
    assert lines[-1] == "Next: assay explain module-error"


def test_a_failure_without_a_place_names_the_levels() -> None:
    verdict = failed_verdict(
        levels={
            "tokens": Level(verdict=Outcome.FAIL),
            "logits": Level(verdict=Outcome.FAIL),
            "modules": Level(verdict=Outcome.PASS),
        },
        location=None, diagnosis=None, noise_ratio=None, limit=None, statistic=None,
    )  # fmt: skip
    assert message(verdict) == (
        "The candidate differs from the reference in tokens and logits; "
        "no single place explains it.\n"
        "  every module agrees where it gets the reference's own inputs"
    )


def test_a_failure_without_a_place_does_not_name_a_module_in_its_diagnosis() -> None:
    reason = "batch 0: (4, 5) tokens instead of (4, 8)"
    verdict = failed_verdict(
        levels={
            "tokens": Level(verdict=Outcome.FAIL, reason=reason),
            "logits": Level(verdict=Outcome.PASS),
            "modules": Level(verdict=Outcome.PASS),
        },
        location=None, noise_ratio=None, limit=None, statistic=None,
    )  # fmt: skip
    assert message(verdict) == (
        "The candidate differs from the reference in tokens; no single place explains it.\n"
        "  batch 0: (4, 5) tokens instead of (4, 8)\n"
        "  every module agrees where it gets the reference's own inputs\n"
        "  diagnosis module-error: something else is computed, and not by one of the compared"
        " modules alone\n"
        "Next: assay explain module-error"
    )


def test_a_failure_of_logits_alone_says_that_modules_were_not_compared() -> None:
    levels = {
        "logits": Level(verdict=Outcome.FAIL),
        "modules": Level(verdict=None, reason="checked at level logits"),
    }
    verdict = failed_verdict(levels=levels, location=None, noise_ratio=None)
    assert message(verdict).splitlines()[1] == (
        "  modules were not compared: checked at level logits"
    )


def test_a_systematic_statistic_is_called_what_it_is() -> None:
    verdict = failed_verdict(levels={}, statistic="replay-slope", noise_ratio=16.0, limit=7.0)
    row = measured(statistic="replay-slope", actual=1e-3, expected=6.25e-5, ratio=16.0, limit=7.0)
    assert message(verdict, row).splitlines()[1] == (
        "  systematic scale error 1e-3 = 16.0x the bfloat16 noise of the same module (limit 7.0x)"
    )


@pytest.mark.parametrize(
    ("phase", "subject"),
    [
        ("sampler", "The sampler"),
        ("reduce", "The reduction of gradients"),
        ("clip", "The clipping of gradients"),
        ("optimizer", "The optimizer step"),
        ("checkpoint", "The checkpoint"),
        ("forward", "(model)"),
    ],
)
def test_every_phase_has_a_subject(phase: Phase, subject: str) -> None:
    verdict = failed_verdict(location=Location(phase=phase, step=1), diagnosis=None)
    headline = explain_verdict(verdict, DecidingRows()).headline
    assert headline == f"{subject} ({phase}, step 1) differs from the reference."


def test_an_error_of_all_gradients_is_not_the_model_s() -> None:
    of_all = failed_verdict(location=Location(phase="backward"), diagnosis=None)
    of_model = failed_verdict(location=Location(phase="backward", module=""), diagnosis=None)
    assert explain_verdict(of_all, DecidingRows()).headline == (
        "The gradients of all parameters (backward, step 0) differ from the reference."
    )
    assert explain_verdict(of_model, DecidingRows()).headline == (
        "(model) (backward, step 0) differs from the reference."
    )


def test_a_weight_that_loading_changed_comes_before_the_error_of_its_module() -> None:
    reason = "a.weight changed after loading, before the first forward pass, in row 7 of 128: relative error 0.5"
    load = Level(verdict=Outcome.FAIL, reason=reason)
    assert message(failed_verdict(levels={"load": load})).splitlines()[1] == f"  {reason}"


def test_a_wrong_loss_has_the_reason_of_its_own_level() -> None:
    levels = {
        name: Level(verdict=Outcome.FAIL, reason=f"{name} is wrong")
        for name in ("loss", "activations")
    }
    loss = Location(phase="forward", module="", op="loss")
    assert message(failed_verdict(levels=levels, location=loss)).splitlines()[:2] == [
        "The loss (forward, step 0) differs from the reference.",
        "  loss is wrong",
    ]


def test_missing_share_of_a_micro_batch_is_not_made_at_one_module() -> None:
    reason = "the gradients lack the share of micro-batch 1 (step 0)"
    verdict = failed_verdict(
        levels={"gradients": Level(verdict=Outcome.FAIL, reason=reason)},
        location=Location(phase="backward"), diagnosis="missing-reduction",
    )  # fmt: skip
    assert "the error is made here" not in message(verdict)
    assert message(verdict).splitlines()[1] == f"  {reason}"


def test_what_is_known_in_words_takes_the_place_of_an_inequality() -> None:
    level = Level(verdict=Outcome.FAIL, reason="labels: prompts are trained on")
    verdict = failed_verdict(
        levels={"inputs": level}, location=Location(phase="inputs", module=""),
        diagnosis="inputs-differ", statistic="exact", noise_ratio=math.inf, limit=0.0,
    )  # fmt: skip
    assert message(verdict) == (
        "The inputs of the model (inputs, step 0) differ from the reference.\n"
        "  labels: prompts are trained on\n"
        "  diagnosis inputs-differ: inputs or labels are not those of the reference\n"
        "Next: assay explain inputs-differ"
    )


def test_a_ratio_has_its_value_without_measurements() -> None:
    suspect = Suspect(
        location=Location(phase="forward", module=DOWN_PROJ), statistic="replay-tensor",
        error=0.041, noise_ratio=14.6, limit=3.0,
    )  # fmt: skip
    verdict = failed_verdict(levels={}, suspects=[suspect])
    assert "relative error 4.1e-2 = 14.6x" in message(verdict)


def test_names_cannot_forge_a_line_of_the_message() -> None:
    verdict = failed_verdict(
        location=Location(phase="forward", module="a\nPASS\x1b[2J"), diagnosis=None
    )
    assert message(verdict).splitlines()[0] == (
        r"a\nPASS\u001b[2J (forward, step 0) differs from the reference."
    )
    assert one_line("a\u202eb") == r"a\u202eb"


def test_a_pass_says_what_was_compared_and_what_it_could_not_see() -> None:
    verdict = Verdict(
        verdict=Outcome.PASS,
        model={"name": "micro:llama"},
        reference={"run": "cpu/float32"},
        candidate={"run": "cpu/bfloat16"},
        levels={
            "inputs": Level(verdict=Outcome.PASS, compared=24),
            "modules": Level.model_validate(
                {"verdict": "PASS", "compared": 1255, "limits_origin": "calibrated on 312 runs"}
            ),
            "sampler": Level(verdict=None, reason="greedy decoding has no sampler"),
        },
        noise_ratio=1.31,
        limit=3.0,
        statistic="replay-tensor",
        resolution=0.0084,
        compared=1279,
    )
    row = measured(actual=0.003668, expected=0.0028, ratio=1.31)
    explanation = explain_verdict(verdict, find_deciding_rows(verdict, [row]))
    assert explanation.title == "PASS: micro:llama on cpu/bfloat16 against cpu/float32"
    assert explanation.message == (
        "The candidate agrees with the reference.\n"
        "  compared 1,279 tensor pairs (inputs 24, modules 1,255)\n"
        "  not run: sampler: greedy decoding has no sampler\n"
        "  resolution 8.4e-3 (modules, at model.layers.3.mlp.down_proj): an error above it is always seen;"
        " below it, only some systematic ones are"
    )


def test_pass_near_a_limit_names_the_place() -> None:
    levels = {"gradients": Level(verdict=Outcome.PASS, compared=3, limits_origin="measured")}
    verdict = Verdict(
        verdict=Outcome.PASS, levels=levels, noise_ratio=1.5, limit=3.0, statistic="replay-tensor",
        resolution=0.0084, compared=3,
    )  # fmt: skip
    row = measured(actual=0.0042, expected=0.0028, ratio=1.5, level="gradients").model_copy(
        update={"phase": "backward", "step": 2}
    )
    assert (
        "  nearest to its limit at model.layers.3.mlp.down_proj (backward, step 2): relative error 4.2e-3 ="
        " 1.5x the noise of the same module (limit 3.0x, measured)\n"
    ) in message(verdict, row)


def test_a_pass_without_a_resolution_admits_it() -> None:
    verdict = Verdict(verdict=Outcome.PASS, compared=1)
    assert message(verdict) == (
        "The candidate agrees with the reference.\n"
        "  compared 1 tensor pair\n"
        "  the resolution is unknown: a small error may be unseen"
    )


def test_what_was_not_compared_is_named() -> None:
    verdict = Verdict(
        verdict=Outcome.NOT_COMPARED,
        levels={
            "logits": Level(verdict=Outcome.PASS, compared=4),
            "modules": Level(verdict=Outcome.NOT_COMPARED, reason="2 modules were never called"),
        },
        unmatched=Unmatched(expected=[f"layers.{n}:output" for n in range(7)]),
        compared=4,
    )
    explanation = explain_verdict(verdict, DecidingRows())
    assert explanation.title == "NOT_COMPARED: the model on the candidate against the reference"
    assert explanation.message == (
        "Not everything that was asked for could be compared: this is not a pass.\n"
        "  compared 4 tensor pairs (logits 4)\n"
        "  modules was not compared: 2 modules were never called\n"
        "  expected and not found (7): layers.0:output, layers.1:output, layers.2:output, "
        "layers.3:output, layers.4:output and 2 more"
    )


def test_what_was_not_memorized_is_reported_by_its_reason_and_the_target() -> None:
    verdict = Verdict(
        verdict=Outcome.FAIL,
        levels={"overfit": Level(verdict=Outcome.FAIL, reason="its loss is 4", compared=3)},
        location=Location(phase="optimizer", step=59),
        diagnosis="optimizer-update",
        statistic="overfit-loss",
        noise_ratio=8.0,
        limit=1.0,
    )
    row = Measurement(
        level="overfit", module="", port="loss", phase="optimizer", statistic="overfit-loss",
        actual=4.0, expected=0.5, ratio=8.0, limit=1.0,
    )  # fmt: skip

    assert message(verdict, row) == (
        "The candidate does not memorize the sequences that the reference memorizes.\n"
        "  its loss is 4\n"
        "  loss of the last steps 4.0 = 8.0x the target of 0.5\n"
        "  diagnosis optimizer-update: the gradients are equal, and the update differs\n"
        "Next: assay explain optimizer-update"
    )


def test_pass_counts_its_own_unit_and_has_no_resolution() -> None:
    verdict = Verdict(
        verdict=Outcome.PASS, levels={"equivalent": Level(verdict=Outcome.PASS, compared=5)},
        noise_ratio=0.5, limit=1.0, statistic="loss-error", resolution=0.0, compared=5,
        compared_unit="losses, tensors and runs",
    )  # fmt: skip
    row = Measurement(
        level="equivalent", module="", port="loss", statistic="loss-error", actual=1e-5,
        expected=2e-5, ratio=0.5, limit=1.0,
    )  # fmt: skip
    assert message(verdict, row) == (
        "The candidate agrees with the reference.\n"
        "  compared 5 losses, tensors and runs (equivalent 5)\n"
        "  nearest to its limit at equivalent: relative error of the losses 1e-5 = 0.5x the difference that chance"
        " explains (limit 1.0x)"
    )


def test_failure_says_the_reason_of_its_level_and_no_place_of_origin() -> None:
    level = Level(verdict=Outcome.FAIL, reason="loss nan in step 3", compared=1)
    verdict = Verdict(
        verdict=Outcome.FAIL, levels={"loss": level}, compared=1, compared_unit="items",
        location=Location(phase="forward", step=3), diagnosis="non-finite",
    )  # fmt: skip
    assert message(verdict).splitlines()[0] == "loss: loss nan in step 3"
    assert "the error is made here" not in message(verdict)


@pytest.mark.parametrize(
    ("resolution", "words"),
    [
        (0.0, "resolution 0: values that must be equal are compared exactly"),
        (2.5, "resolution 2.5: at the place with the most noise, even zeros would agree"),
    ],
)
def test_a_resolution_that_is_no_relative_error_is_put_into_words(
    resolution: float, words: str
) -> None:
    verdict = Verdict(verdict=Outcome.PASS, compared=1, resolution=resolution)
    assert message(verdict).endswith(f"\n  {words}")


def measured_at(module: str, **changes: Any) -> Measurement:
    facts: dict[str, Any] = {
        "level": "modules", "module": module, "port": "output", "statistic": "replay-tensor",
        "actual": 0.02, "expected": 0.01, "ratio": 2.0, "limit": 3.0,
    }  # fmt: skip
    return Measurement(**{**facts, **changes})


def failed_at(module: str, ratio: float) -> Verdict:
    return Verdict(
        verdict=Outcome.FAIL,
        location=Location(phase="forward", module=module),
        noise_ratio=ratio,
        statistic="replay-tensor",
    )


def test_the_deciding_row_is_at_the_place_with_that_very_ratio() -> None:
    right = measured_at("b", ratio=5.0)
    rows = [measured_at("a", ratio=5.0), measured_at("b", ratio=4.0), right]
    assert find_deciding_rows(failed_at("b", 5.0), rows).deciding is right


def test_another_statistic_of_that_ratio_does_not_decide() -> None:
    rows = [measured_at("b", ratio=5.0, statistic="replay-bins")]
    assert find_deciding_rows(failed_at("b", 5.0), rows).deciding is None


def test_another_phase_of_the_module_does_not_decide() -> None:
    rows = [measured_at("b", ratio=5.0, phase="backward")]
    assert find_deciding_rows(failed_at("b", 5.0), rows).deciding is None


def test_a_nan_ratio_is_found() -> None:
    row = measured_at("b", ratio=math.nan)
    assert find_deciding_rows(failed_at("b", math.nan), [row]).deciding is row


def test_the_worst_token_is_one_of_the_place() -> None:
    worst = measured_at("b", statistic="token", ratio=8.0, prompt=0, position=2)
    rows = [
        measured_at("a", statistic="token", ratio=9.0, prompt=0, position=1),
        measured_at("b", statistic="token", ratio=7.0, prompt=0, position=1),
        worst,
    ]
    assert find_deciding_rows(failed_at("b", 5.0), rows).worst_token is worst


def test_a_token_with_nan_is_worse_than_any_ratio() -> None:
    worst = measured_at("b", statistic="token", ratio=math.nan, prompt=0, position=2)
    rows = [worst, measured_at("b", statistic="token", ratio=1e30, prompt=0, position=1)]
    assert find_deciding_rows(failed_at("b", 5.0), rows).worst_token is worst


def test_a_pass_has_no_worst_token() -> None:
    row = measured_at("b", statistic="token", ratio=8.0, prompt=0, position=2)
    assert find_deciding_rows(Verdict(verdict=Outcome.PASS), [row]).worst_token is None


def test_the_source_of_the_limit_is_that_of_the_deciding_level() -> None:
    verdict = failed_at("b", 5.0)
    verdict.levels = {
        "logits": Level.model_validate({"verdict": "FAIL", "limits_origin": "of logits"}),
        "modules": Level.model_validate({"verdict": "FAIL", "limits_origin": "of modules"}),
    }
    assert find_deciding_rows(verdict, [measured_at("b", ratio=5.0)]).limits_origin == "of modules"


def test_nan_ranks_with_infinity() -> None:
    assert severity(math.nan) == math.inf
    assert severity(2.0) == 2.0


def test_rows_of_different_statistics_rank_by_ratio_over_limit() -> None:
    assert over_limit(measured_at("a", ratio=6.0, limit=3.0)) == 2.0
    assert over_limit(measured_at("a", ratio=6.0, limit=None)) == 6.0
    assert over_limit(measured_at("a", ratio=math.nan, limit=3.0)) == math.inf


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        ("cpu/bfloat16", "hardly checked; float32 sees more"),
        ("cpu/float32", "hardly checked at e: its values are random, or nearly cancel"),
    ],
)
def test_each_level_has_its_own_coarsest_row(run: str, reason: str) -> None:
    rows = [
        measured_at("a", actual=0.01, ratio=1.0),
        measured_at("b", actual=0.02, expected=0.02, ratio=1.0),
        measured_at("c", expected=9.0, statistic="replay-slope"),  # sees one form of error only
        measured_at("d", expected=9.0, limit=None),
        measured_at("e", level="updates", actual=0.2, expected=0.2, ratio=1.0),
        measured_at("f", level="updates", actual=0.5, expected=0.5, ratio=1.0),  # a zero would pass
        measured_at("e", level="updates", expected=9.0, statistic="replay-row"),
    ]
    verdict = Verdict(verdict=Outcome.PASS, resolution=0.06, compared=1, candidate={"run": run})
    found = find_deciding_rows(verdict, rows)

    assert {level: row.module for level, row in found.coarsest.items()} == {
        "modules": "b",
        "updates": "e",
    }
    assert describe_resolution(verdict, found) == (
        f"resolution 6e-2 (modules, at b), updates 0.6 ({reason}): an error above it is always seen;"
        " below it, only some systematic ones are"
    )


def test_a_floor_above_the_noise_is_what_is_resolved() -> None:
    # The noise run errs by 0.01, and the ratio is to a floor of 0.02.
    row = measured_at("a", actual=0.02, expected=0.01, ratio=1.0)

    assert row.resolution == 3.0 * 0.02


def test_a_failure_quotes_the_resolution_of_its_own_place() -> None:
    rows = [
        measured_at("b", actual=0.05, ratio=5.0),
        measured_at("a", level="updates", expected=9.0),
    ]
    verdict = failed_at("b", 5.0).model_copy(update={"resolution": 0.03})

    assert describe_resolution(verdict, find_deciding_rows(verdict, rows)) == (
        "resolution 3e-2 (modules, at b): an error above it is always seen; below it, only some systematic ones are"
    )


def test_each_clause_of_a_long_reason_is_a_line() -> None:
    levels = {
        "long": Level(verdict=Outcome.FAIL, reason="a; b; c; d"),
        "short": Level(verdict=Outcome.FAIL, reason="a; b"),
    }
    verdict = Verdict(verdict=Outcome.FAIL, headline="It differs.", levels=levels)
    details = explain_verdict(verdict, find_deciding_rows(verdict, [])).details
    assert details == ("long: a", "  b", "  c", "  d", "short: a; b")


def test_a_name_that_the_headline_has_is_not_repeated() -> None:
    levels = {"e": Level(verdict=Outcome.FAIL, reason="stale: other weights", compared=1)}
    verdict = Verdict(verdict=Outcome.FAIL, headline="e is stale", levels=levels)
    assert message(verdict) == "e is stale\n  stale: other weights"
    levels["f"] = levels["e"].model_copy(update={"reason": "too large"})
    verdict = Verdict(verdict=Outcome.FAIL, headline="e is stale", levels=levels)
    assert message(verdict) == "e is stale\n  e: stale: other weights\n  f: too large"
