"""Ratios of observations, their explanations, and verdicts over expectations.

Shapes: R tokens, K kept ids and the rest.
"""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from assay.judge.coverage import Usage
from assay.judge.levels import find_worst
from assay.models import RECIPES
from assay.verdicts import Outcome
from assay_expectations.judging import (
    Judged,
    describe_form,
    is_within_limits,
    judge_numbers,
    limits_origin,
    relative_errors,
    values_of,
)
from assay_expectations.records import (
    AllSeen,
    Distributions,
    Exact,
    Expectation,
    Key,
    Machine,
    Observed,
    Seen,
    list_steps,
)
from assay_expectations.verdict import judge_seen
from packages.expectations.tests.unit.sample_expectations import (
    MACHINE,
    NOISE,
    VERSIONS,
    YARDSTICK,
    distributions,
    expectation,
    observed,
    off,
)


def judge(expected: Expectation, given: Distributions) -> Judged:
    return judge_numbers(expected.signature, given, expected.key.machine.dtype, expected.limits)


def test_ratios_divide_the_two_errors() -> None:
    # Errors of 1 and 3 times the noise: rms sqrt((1 + 9) / 2), worst 3.
    judged = judge(expectation(2), distributions(off(NOISE), off(3 * NOISE)))
    assert values_of(judged) == pytest.approx(
        {"logits-error": math.sqrt(5), "logits-worst": 3, "logits-whole": math.sqrt(5)}
    )
    assert not is_within_limits(judged)
    assert find_worst(judged.values()).statistic == "logits-error"


def test_captured_run_passes_with_a_ratio_of_one() -> None:
    judged = judge(expectation(2), distributions(off(NOISE), off(NOISE)))
    assert set(values_of(judged).values()) == {1.0}
    assert is_within_limits(judged)


def test_one_bad_token_fails_even_if_the_average_passes() -> None:
    judged = judge(expectation(10), distributions(*[off(NOISE)] * 9, off(4 * NOISE)))
    # rms sqrt((9 + 16) / 10) = 1.58 is within 2, the worst token's 4 is over 3.
    assert values_of(judged)["logits-error"] == pytest.approx(math.sqrt(2.5))
    assert find_worst(judged.values()).statistic == "logits-worst"
    assert not is_within_limits(judged)


def test_error_outside_of_the_kept_ids_fails() -> None:
    captured = expectation()
    given = captured.signature.captured.model_copy(update={"projections": [[[[-1.0 + 3 * NOISE]]]]})
    judged = judge(captured, given)
    assert values_of(judged) == pytest.approx(
        {"logits-error": 1.0, "logits-worst": 1.0, "logits-whole": 3.0}
    )
    assert not is_within_limits(judged)


def test_noise_floor_is_half_a_unit_roundoff() -> None:
    half_a_unit = 2.0**-9  # bfloat16 has 8 bits of significand
    # The value of the rest has no error and equals the mean of the kept values.
    judged = judge(expectation(noise=0.0), distributions(off(1.5 * half_a_unit)))
    assert values_of(judged) == pytest.approx(dict.fromkeys(values_of(judged), 1.5))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_output_has_an_infinite_ratio(bad: float) -> None:
    judged = judge(expectation(2), distributions(off(NOISE), [bad, YARDSTICK[1]]))
    assert find_worst(judged.values()).value == math.inf
    assert not is_within_limits(judged)


def test_relative_errors_by_hand() -> None:
    expected = np.array([[-1.0, -3.0], [-2.0, -6.0], [-1.0, -math.inf], [0.0, 0.0]])
    actual = np.array([[-1.0, -3.0], [-2.0, -7.0], [-1.0, -math.inf], [0.0, 0.0]])
    # Second row: error sqrt(1 / 2) over a spread of 2.
    np.testing.assert_allclose(relative_errors(actual, expected), [0, math.sqrt(0.5) / 2, 0, 0])


def test_impossible_token_that_became_possible_has_an_infinite_error() -> None:
    errors = relative_errors(np.array([[-1.0, -9.0]]), np.array([[-1.0, -math.inf]]))
    assert errors[0] == math.inf


def host(**changes: str) -> Machine:
    record = {"vendor": "cpu", "architecture": "x86_64", "dtype": "float32", "precision": "float32"}
    return Machine.model_validate(record | changes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_origin_of_the_limits_matches_the_documented_table(dtype: str) -> None:
    text = (Path(__file__).parents[4] / "docs" / "expectations.md").read_text(encoding="utf-8")
    table = text.partition("| run | float32 | bfloat16 |")[2].partition("| **")[0]
    runs = re.findall(r"([\d.]+) / ([\d.]+) / ([\d.]+)", table)
    assert runs
    pooled, worst, whole = (max(float(run[part]) for run in runs) for part in range(3))
    assert limits_origin("micro:llama", host(dtype=dtype, precision=dtype)) == (
        f"{len(RECIPES) * len(runs)} clean runs reached {pooled} pooled, {worst} at the worst token and {whole} over"
        " the whole vocabulary"
    )


@pytest.mark.parametrize(
    ("model", "machine"),
    [
        ("gemma2", host()),
        ("micro:llama?trained=0", host()),
        ("micro:llama", host(architecture="aarch64")),
        ("micro:llama", host(vendor="other")),
        ("micro:llama", host(dtype="float16", precision="float16")),
        ("micro:llama", host(precision="tf32")),
    ],
)
def test_origin_without_calibration_names_no_runs(model: str, machine: Machine) -> None:
    assert limits_origin(model, machine) == "not calibrated for this model and device"


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        (
            observed(distributions(off(NOISE)), dtype="float32"),
            "the model's parameters are float32, expected bfloat16",
        ),
        (
            observed(distributions([math.nan, -3.0])),
            "the log-probabilities of 1 of 1 tokens are not finite",
        ),
        (observed(distributions(off(5 * NOISE))), None),
    ],
)
def test_another_form_of_the_outputs_is_named(seen: Observed, message: str | None) -> None:
    assert describe_form(expectation().signature, seen, "bfloat16") == message


EXPECTATION = expectation()
OTHER = MACHINE.model_copy(update={"architecture": "a2"})
RUN = "acme/bfloat16"


def elsewhere(expected: Expectation = EXPECTATION) -> Expectation:
    """The expectation of another machine with the same rounding."""
    key = Key(machine=OTHER, content=expected.key.content)
    return expected.model_copy(update={"key": key})


def here(*seen: Seen, versions: dict[str, str] = VERSIONS) -> AllSeen:
    return AllSeen(machine=MACHINE, versions=versions, seen=list(seen))


def seen(given: float = NOISE, file: str = "a.json") -> Seen:
    return Seen(file=file, observed=observed(distributions(off(given))))


def test_met_expectation_passes() -> None:
    verdict, rows = judge_seen(RUN, [EXPECTATION], here(seen()))
    assert verdict.verdict is Outcome.PASS
    assert (verdict.noise_ratio, verdict.limit, verdict.compared) == (1.0, 2.0, 1)
    assert [(row.level, row.statistic, row.ratio) for row in rows] == [
        ("a", "logits-error", 1.0),
        ("a", "logits-worst", 1.0),
        ("a", "logits-whole", 1.0),
    ]
    assert verdict.notes == []


def test_missed_expectation_fails_with_the_next_command() -> None:
    wrong = observed(distributions(off(10 * NOISE)))
    verdict, _ = judge_seen(RUN, [EXPECTATION], here(Seen(file="a.json", observed=wrong)))
    assert verdict.verdict is Outcome.FAIL
    assert verdict.noise_ratio == pytest.approx(10)
    assert verdict.diagnosis is None
    assert "is 10.0x the error of the captured run (limit 2.0x)" in str(verdict.levels["a"].reason)
    assert verdict.notes == []
    assert list_steps(*verdict.next_steps) == (
        "to find the operation:\n  assay check generate micro:llama --reference cpu/float32 --candidate"
        " acme/bfloat16"
    )


def test_the_next_command_keeps_the_setup() -> None:
    wrong = observed(distributions(off(10 * NOISE)))
    answer = here(Seen(file="a.json", observed=wrong)).model_copy(update={"setup": "k.py:install"})
    step = judge_seen(RUN, [EXPECTATION], answer)[0].next_steps
    assert list_steps(*step).endswith(" --candidate acme/bfloat16 --candidate-setup k.py:install")


def test_every_command_names_the_model_that_was_verified() -> None:
    wrong = Seen(file="a.json", observed=observed(distributions(off(10 * NOISE))))
    stale = Seen(file="a.json", stale=["different tokenizer"])
    for expected, one in ((EXPECTATION, wrong), (EXPECTATION, stale), (elsewhere(), wrong)):
        answer = here(one).model_copy(update={"model": "other"})
        verdict, _ = judge_seen(RUN, [expected], answer)
        assert (verdict.model, verdict.candidate["model"]) == ({"name": "other"}, "other")
        commands = [step.command for step in verdict.next_steps]
        assert commands
        assert all(" other " in command or "--model other" in command for command in commands)


def test_next_steps_are_those_of_each_file_the_worst_first() -> None:
    files = [seen((10 + number) * NOISE, f"{name}.json") for number, name in enumerate("abcdef")]
    absent = Seen(file="0.json", missing="there is no folder m")
    verdict, _ = judge_seen(RUN, [EXPECTATION] * 7, here(absent, *files))
    *steps, last = verdict.next_steps
    check = "assay check generate micro:llama --reference cpu/float32 --candidate acme/bfloat16"
    assert [(step.purpose, step.command) for step in steps] == [
        (f"{name}: to find the operation", check) for name in "fed"
    ]
    assert str(last) == "4 more files have their next steps in verdict.json"
    assert all((level.model_extra or {})["next"] for level in verdict.levels.values())
    assert verdict.notes == []


def test_several_failures_are_named_by_their_own_words_and_the_numbers_are_of_the_worst() -> None:
    stale = seen(file="stale.json").model_copy(update={"stale": ["different tokenizer"]})
    wrong = seen(10 * NOISE, "wrong.json")
    verdict, _ = judge_seen(RUN, [EXPECTATION] * 3, here(stale, seen(), wrong))
    assert verdict.headline == (
        "2 of 3 expectations failed: wrong differs from the captured outputs; stale is stale: its model or its"
        " inputs changed"
    )
    assert verdict.noise_ratio == pytest.approx(10)
    assert verdict.diagnosis is None
    absent = [Seen(file=f"{name}.json", missing="no folder") for name in "abcd"]
    verdict, _ = judge_seen(RUN, [EXPECTATION] * 4, here(*absent))
    assert verdict.headline == (
        "4 of 4 expectations were not compared: a was not compared; b was not compared; c was not compared; and 1"
        " more"
    )


def test_a_pass_states_its_largest_error_and_the_tokens() -> None:
    verdict, _ = judge_seen(RUN, [EXPECTATION], here(seen()))
    assert verdict.next_steps == []
    assert verdict.headline == (
        "The outputs agree with the capture, over 1 token: the largest error, relative error of the logits"
        " 1e-2, is 1.0x that of the captured run (limit 2.0x; by hand). In bfloat16, errors of the run below 2e-2 over all"
        " tokens, or below 3e-2 at one token, may not show."
    )
    assert verdict.resolution == pytest.approx(3e-2)
    for order in (1, -1):
        pair = [
            (EXPECTATION, seen(file="a.json")),
            (expectation(noise=NOISE / 2), seen(NOISE / 2, "b.json")),
        ]
        expected, files = zip(*pair[::order], strict=True)
        verdict, _ = judge_seen(RUN, list(expected), here(*files))
        assert str(verdict.headline).endswith(
            "2e-2 over all tokens, or below 3e-2 at one token, may not show."
        )
    other = Seen(file="b.json", observed=observed(distributions(off(1.5 * NOISE))))
    verdict, _ = judge_seen(RUN, [EXPECTATION, EXPECTATION], here(seen(), other))
    assert str(verdict.headline).startswith(
        "All 2 expectations hold, over 2 tokens: the largest error in b, relative error of the logits"
        " 1.5e-2, is 1.5x"
    )


LAYERS = EXPECTATION.model_copy(update={"exact_layers": {"a": [1, 1, 0], "a.b": [1, 2, 0]}})


@pytest.mark.parametrize(
    ("effect", "note"),
    [
        (Exact(yardstick=distributions(off(1e-6)), exact_layers={"a": [1, 1.000001, 0]}), None),
        (
            Exact(yardstick=distributions(off(1e-3)), exact_layers={"a.b": [1, 2.5, 0]}),
            (
                "the setup function moves the outputs in float64 on the host, first in a.b by 0.25: relative error over"
                " the whole vocabulary 1e-3 is 0.1x the error of the captured run (limit 2.0x). bfloat16 hides this; a"
                " capture in float32 would show it"
            ),
        ),
        (
            "expected a device",
            (
                "whether bfloat16 hides an error is not known, as the setup function fails in float64 on the host:"
                " expected a device"
            ),
        ),
    ],
)
def test_effect_of_a_setup_function_that_a_dtype_hides_is_noted(
    effect: Exact | str, note: str | None
) -> None:
    given = seen().model_copy(update={"setup_effect": effect})
    verdict, _ = judge_seen(RUN, [LAYERS], here(given))
    assert verdict.verdict is Outcome.PASS
    assert verdict.notes == ([] if note is None else [f"a: {note}"])


REPEATED = EXPECTATION.model_copy(update={"captures": EXPECTATION.captures * 2})
THREADS = {"num_threads": 1}


@pytest.mark.parametrize(
    ("by", "size", "settings", "facts", "has_note"),
    [
        (REPEATED, 1.01, THREADS, {}, True),
        (REPEATED, 1.0, THREADS, {}, False),
        (EXPECTATION, 1.01, THREADS, {}, False),  # one capture does not show that it repeats
        (REPEATED, 1.01, {"num_threads": 2}, {}, False),
        (REPEATED, 1.01, THREADS, {"versions": VERSIONS | {"torch": "2.14.0"}}, False),
        (REPEATED, 1.01, THREADS, {"variables": {"ATEN_CPU_CAPABILITY": "default"}}, False),
        (REPEATED, 1.01, THREADS, {"setup": "k.py:install"}, False),
    ],
)
def test_a_run_that_rounds_otherwise_without_a_recorded_cause_is_noted(
    by: Expectation,
    size: float,
    settings: dict[str, int],
    facts: dict[str, object],
    *,
    has_note: bool,
) -> None:
    run = observed(distributions(off(size * NOISE))).model_copy(update={"torch_settings": settings})
    answer = here(Seen(file="a.json", observed=run)).model_copy(update=facts)
    verdict, _ = judge_seen(RUN, [by], answer)
    assert verdict.verdict is Outcome.PASS
    assert any("not bitwise the captured one" in note for note in verdict.notes) is has_note


def test_nan_is_a_failure_with_its_diagnosis() -> None:
    wrong = observed(distributions([float("nan"), -3.0]))
    verdict, _ = judge_seen(RUN, [EXPECTATION], here(Seen(file="a.json", observed=wrong)))
    assert verdict.verdict is Outcome.FAIL
    assert verdict.diagnosis == "non-finite"


def test_stale_expectation_fails_with_the_differences() -> None:
    stale = Seen(file="a.json", stale=["different tokenizer", "seed 0 → 1"])
    verdict, rows = judge_seen(RUN, [EXPECTATION], here(stale))
    assert verdict.verdict is Outcome.FAIL
    assert verdict.levels["a"].reason == (
        "stale, different content: different tokenizer; seed 0 → 1"
    )
    assert rows == []


def test_model_that_cannot_run_fails_and_others_are_judged() -> None:
    broken = Seen(file="b.json", problem="the weights lack lm_head.weight")
    verdict, _ = judge_seen(RUN, [EXPECTATION, EXPECTATION], here(seen(), broken))
    assert verdict.verdict is Outcome.FAIL
    assert verdict.levels["a"].verdict is Outcome.PASS
    assert verdict.levels["b"].reason == "the weights lack lm_head.weight"
    assert verdict.unmatched.expected == ["b"]


def test_changed_software_is_compared_and_listed() -> None:
    now = {"torch": "2.14.0", "runtime": "1"}
    verdict, _ = judge_seen(RUN, [EXPECTATION], here(seen(), versions=now))
    assert verdict.verdict is Outcome.PASS
    (note,) = verdict.notes
    assert note == (
        "a: changed since the capture: driver 7 → absent, runtime absent → 1, torch 2.13.0 → 2.14.0"
    )


def test_changed_software_does_not_excuse_a_failure() -> None:
    now = VERSIONS | {"torch": "2.14.0"}
    verdict, _ = judge_seen(RUN, [EXPECTATION], here(seen(10 * NOISE), versions=now))
    assert verdict.verdict is Outcome.FAIL
    assert verdict.notes[0] == "a: changed since the capture: torch 2.13.0 → 2.14.0"


def test_expectation_of_another_dtype_is_named_by_it() -> None:
    machine = Machine(vendor="acme", architecture="a1", dtype="float32", precision="tf32")
    key = EXPECTATION.key.model_copy(update={"machine": machine})
    other = EXPECTATION.model_copy(update={"key": key, "model": "other"})
    unseen = Seen(file="b.json")
    verdict, _ = judge_seen(RUN, [EXPECTATION, other], here(seen(), unseen))
    assert verdict.notes == ["b is not verified here: it is of float32 with operands in tf32"]
    assert verdict.model == {"name": EXPECTATION.model}


def test_expectations_of_other_machines_are_not_a_pass() -> None:
    verdict, rows = judge_seen(RUN, [elsewhere()], here(Seen(file="a.json")))
    assert verdict.verdict is Outcome.NOT_COMPARED
    assert verdict.levels["expectations"].reason == (
        "a belongs to another machine: architecture a2 → a1"
    )
    assert (
        list_steps(*verdict.next_steps)
        == "assay expect capture micro:llama --run acme/bfloat16 --output ."
    )
    assert verdict.unmatched.expected == []
    assert rows == []


def test_a_capture_elsewhere_repeats_the_inputs_of_each_file() -> None:
    own = elsewhere().model_copy(update={"prompts": [[1, 2]], "model": "mine"})
    here_twice = here(Seen(file="e/a.json"), Seen(file="e/b.json"))
    verdict, _ = judge_seen(RUN, [own, elsewhere()], here_twice)
    assert [step.command for step in verdict.next_steps] == [
        "assay expect capture mine --run acme/bfloat16 --output e --prompts e/a.json",
        "assay expect capture micro:llama --run acme/bfloat16 --output e",
    ]


def test_expectations_of_other_machines_do_not_change_the_verdict() -> None:
    verdict, _ = judge_seen(RUN, [EXPECTATION, elsewhere()], here(seen(), Seen(file="b.json")))
    assert verdict.verdict is Outcome.PASS
    assert list(verdict.levels) == ["a"]
    assert verdict.notes == ["b belongs to another machine: architecture a2 → a1"]


def test_many_expectations_of_other_machines_are_one_note() -> None:
    others = [Seen(file=f"{name}.json") for name in "bcde"]
    verdict, _ = judge_seen(RUN, [EXPECTATION, *[elsewhere()] * 4], here(seen(), *others))
    assert verdict.notes == [
        "4 expectations belong to other machines or dtypes: b, c, d and 1 more"
    ]


def test_files_with_equal_names_are_distinguished() -> None:
    both = [seen(file=f"{folder}/a.json") for folder in ("x", "y")]
    verdict, _ = judge_seen(RUN, [EXPECTATION, EXPECTATION], here(*both))
    assert list(verdict.levels) == ["x/a.json", "y/a.json"]


# One module ran, and one did not.
USAGE = Usage(parameters={"a": ["a.w"], "b.c": ["b.c.w"]}, called=["a"], read=["a.w"])


@pytest.mark.parametrize(
    ("allowed", "outcome"),
    [((), Outcome.NOT_COMPARED), (("b",), Outcome.PASS), (("d",), Outcome.NOT_COMPARED)],
)
def test_partly_run_model_passes_only_if_allowed(
    allowed: tuple[str, ...], outcome: Outcome
) -> None:
    partly = seen().model_copy(update={"usage": USAGE})
    verdict, _ = judge_seen(RUN, [EXPECTATION], here(partly), allowed)
    assert verdict.verdict is outcome
    assert verdict.coverage is not None
    assert verdict.coverage.not_run == ["b.c"]
    if outcome is Outcome.NOT_COMPARED:
        assert str(verdict.levels["a"].reason).startswith("never ran: b")


def test_full_coverage_is_reported() -> None:
    whole = USAGE.model_copy(update={"called": ["a", "b.c"], "read": ["a.w", "b.c.w"]})
    verdict, _ = judge_seen(
        RUN, [EXPECTATION], here(seen().model_copy(update={"usage": Usage(**whole.model_dump())}))
    )
    assert verdict.verdict is Outcome.PASS
    assert (verdict.levels["a"].model_extra or {})["coverage"] == (
        "coverage: all 2 modules with parameters ran"
    )
