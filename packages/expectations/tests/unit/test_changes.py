"""Changes between two captures, and their description."""

import math

import pytest

from assay.verdicts import Outcome
from assay_expectations.changes import change_as_markdown, common_part, find_change, judge_pair
from assay_expectations.judging import OUTPUT_LIMITS
from assay_expectations.records import Distributions, Expectation, Key, list_steps
from packages.expectations.tests.unit.sample_expectations import (
    CONTENT,
    MACHINE,
    NOISE,
    distributions,
    expectation,
    off,
)

EXPECTED = expectation(2)


def captured(*errors: float, **update: object) -> Expectation:
    """The expectation, captured with other errors."""
    given = distributions(*[off(error) for error in errors])
    signature = EXPECTED.signature.model_copy(update={"captured": given})
    return EXPECTED.model_copy(update={"signature": signature} | update)


@pytest.mark.parametrize(
    ("times", "kind", "outcome"),
    [
        (1.2, "noise", Outcome.PASS),  # clean runs reached 1.59
        (1.8, "drift", Outcome.PASS),
        (2.1, "break", Outcome.FAIL),  # over 2
    ],
)
def test_size_decides_the_kind_of_change(times: float, kind: str, outcome: Outcome) -> None:
    verdict, rows, change = judge_pair(EXPECTED, captured(times * NOISE, times * NOISE))
    assert (change.kind, verdict.verdict) == (kind, outcome)
    assert verdict.noise_ratio == pytest.approx(times)
    assert len(rows) == 3


def test_difference_between_captures_is_noise() -> None:
    wide = EXPECTED.model_copy(
        update={"captures": [dict.fromkeys(EXPECTED.limits, ratio) for ratio in (1.0, 1.6)]}
    )
    assert find_change(wide, captured(1.5 * NOISE, 1.5 * NOISE)).kind == "noise"


@pytest.mark.parametrize(("times", "kind"), [(1.2, "noise"), (1.8, "drift"), (2.1, "break")])
def test_outputs_that_are_no_logits_have_the_same_kinds_of_change(times: float, kind: str) -> None:
    def of_outputs(one: Expectation) -> Expectation:
        names = {"outputs": ["output-last_hidden_state"]}
        return one.model_copy(
            update={
                "signature": one.signature.model_copy(update=names),
                "limits": OUTPUT_LIMITS,
                "captures": [dict.fromkeys(OUTPUT_LIMITS, 1.0)],
            }
        )

    change = find_change(of_outputs(EXPECTED), of_outputs(captured(times * NOISE, times * NOISE)))
    assert change.kind == kind


def test_modules_with_larger_errors_are_listed_in_order() -> None:
    before = EXPECTED.model_copy(
        update={"layers": {"a": 0.1, "b": 0.0, "c": 0.1, "d": 0.1, "e": 0.1}}
    )
    now = captured(NOISE, layers={"a": 0.19, "b": 1e-9, "c": float("nan"), "d": 0.21})
    assert [layer.module for layer in find_change(before, now).grown] == ["b", "c", "d"]


def test_token_that_moved_most_comes_first() -> None:
    change = find_change(EXPECTED, captured(NOISE, 5 * NOISE))
    (first,) = change.moved
    assert (first.batch, first.row, first.position, first.id) == (0, 0, 1, 0)
    assert (first.expected, first.actual) == pytest.approx((-1 + NOISE, -1 + 5 * NOISE))


CHAT = {"role": "user", "content": "a"}


def test_captures_of_different_content_are_not_compared() -> None:
    content = CONTENT.model_copy(update={"prompts_hash": "p2"})
    verdict, rows, change = judge_pair(
        EXPECTED, captured(NOISE, NOISE, key=Key(machine=MACHINE, content=content))
    )
    assert (change.kind, verdict.verdict, rows) == ("not compared", Outcome.NOT_COMPARED, [])
    assert verdict.levels["outputs"].reason == "built-in prompts with other token ids or padding"
    of_chats = (
        EXPECTED.model_copy(update={"prompts": prompts, "chats": [[CHAT]], "key": key})
        for prompts, key in (
            ([[1, 2]], EXPECTED.key),
            ([[1, 3]], Key(machine=MACHINE, content=content)),
        )
    )
    before, now = of_chats
    of_template, _, change = judge_pair(before, now)
    assert of_template.levels["outputs"].reason == (
        "different prompts: 1 of 1, the first is prompt 0 at its token 1 (both counted from 0): id 2 → 3"
    )
    assert change_as_markdown(before, now, change).startswith(
        "### micro:llama on acme/bfloat16: not compared\n"
    )
    for one in (verdict, of_template):
        assert list_steps(*one.next_steps) == (
            "keep NEW if the change is intended; otherwise restore the files of the model"
        )


def test_other_tokenizer_of_the_same_ids_states_the_size_of_the_change() -> None:
    key = Key(machine=MACHINE, content=CONTENT.model_copy(update={"tokenizer_hash": "t2"}))
    verdict, _, change = judge_pair(EXPECTED, captured(NOISE, NOISE, key=key))
    assert (change.kind, verdict.verdict) == ("not compared", Outcome.NOT_COMPARED)
    assert change.summary.startswith("different tokenizer; the outputs move: relative error of the")


MOVED = distributions([-1.5, -2.5], [-1.5, -2.5])


def with_yardstick(given: Distributions, **update: object) -> Expectation:
    """The expectation of a model whose exact outputs changed, and whose run follows them."""
    signature = EXPECTED.signature.model_copy(
        update={"yardstick": given, "captured": given} | update
    )
    versions = EXPECTED.provenance.versions | {"transformers": "5.23.0"}
    provenance = EXPECTED.provenance.model_copy(update={"versions": versions})
    return EXPECTED.model_copy(update={"signature": signature, "provenance": provenance})


def test_changed_exact_outputs_are_changed_code() -> None:
    before = EXPECTED.model_copy(
        update={"exact_layers": {"a": [2, 1, 1], "b (input)": [2, 4, 3], "b": [2, 1, 0]}}
    )
    # The input of b moves by 0.5 of 5: the caller of b changed.
    now = with_yardstick(MOVED).model_copy(
        update={"exact_layers": {"a": [2, 1, 1], "b (input)": [2, 4, 3.5], "b": [2, 2, 0]}}
    )
    verdict, _, change = judge_pair(before, now)
    assert change.answer == (
        "the model's code changed (transformers absent → 5.23.0): the exact outputs move by 0.5, first in"
        " the model's own forward, outside its modules by 0.1"
    )
    assert (change.kind, verdict.diagnosis) == ("break", "module-error")
    assert verdict.location is not None
    assert verdict.location.module == ""


def test_modules_that_round_moved_values_are_not_its_cause() -> None:
    before = EXPECTED.model_copy(update={"layers": {"a": 0.1, "b": 0.1}})
    now = with_yardstick(MOVED).model_copy(update={"layers": {"a": 0.1, "b": 0.3}})
    verdict, _, change = judge_pair(before, now)
    assert (change.kind, change.grown, verdict.location) == ("break", [], None)
    text = change_as_markdown(before, now, change)
    assert "are not compared, because their exact values moved" in text
    assert "causes the change" not in text


def test_older_captures_without_a_record_of_config_json_name_no_code() -> None:
    older = EXPECTED.model_copy(update={"config": {}})
    assert find_change(older, with_yardstick(MOVED)).answer.startswith(
        "config.json, of which the capture has no record, or the model's code changed (transformers absent →"
    )


def test_changed_exact_outputs_within_the_limits_are_a_break() -> None:
    slightly = distributions(*[off(2e-9)] * 2)
    before = EXPECTED.model_copy(update={"exact_layers": {"a": [2, 1, 0]}})
    layers = {"exact_layers": {"a": [2, 1.5, 0]}}
    now = with_yardstick(slightly, captured=EXPECTED.signature.captured).model_copy(update=layers)
    verdict, _, change = judge_pair(before, now)
    assert (change.kind, verdict.verdict) == ("break", Outcome.FAIL)
    assert (verdict.headline, verdict.diagnosis) == (
        "break: other exact outputs than OLD, first in a", "module-error",
    )  # fmt: skip
    assert change.summary == (
        "the model's code changed (transformers absent → 5.23.0): the exact outputs move by 2e-9, first in a by"
        " 0.5; the run is within the limits: relative error of the logits 1e-2 is 1.0x the error of the older"
        " capture (limit 2.0x)"
    )
    same = with_yardstick(distributions(*[off(5e-10)] * 2), captured=EXPECTED.signature.captured)
    assert find_change(EXPECTED, same).kind == "noise"


def test_changed_settings_are_named_before_code() -> None:
    before = EXPECTED.model_copy(update={"config": {"config.json: rms_norm_eps": 1e-6}})
    now = with_yardstick(MOVED).model_copy(update={"config": {"config.json: rms_norm_eps": 1e-5}})
    verdict, _, change = judge_pair(before, now, "e.json")
    assert change.answer == (
        "config.json: rms_norm_eps 1e-06 → 1e-05: the exact outputs move by 0.5; whether the model's code changed"
        " too is not known"
    )
    assert list_steps(*verdict.next_steps) == (
        "to see whether the model's code changed too, where NEW was captured:\n"
        "  assay expect verify e.json --run acme/bfloat16\nkeep NEW only if the change is intended"
    )


def test_stored_dtype_is_noted_but_moves_nothing() -> None:
    before = EXPECTED.model_copy(update={"config": {"a": 1, "config.json: dtype": "float32"}})
    after = {"config": {"a": 1, "config.json: dtype": "bfloat16"}}
    change = find_change(before, with_yardstick(MOVED).model_copy(update=after))
    assert change.environment[0] == "config.json: dtype float32 → bfloat16"
    assert change.config == []
    assert change.answer.startswith("the model's code changed")


def test_changed_weights_are_compared_without_a_verdict() -> None:
    weights = {"a.weight": CONTENT.weights["a.weight"].model_copy(update={"hash": "h2"})}
    key = Key(machine=MACHINE, content=CONTENT.model_copy(update={"weights": weights}))
    verdict, _, change = judge_pair(EXPECTED, with_yardstick(MOVED).model_copy(update={"key": key}))
    assert (change.kind, verdict.verdict) == ("not compared", Outcome.NOT_COMPARED)
    assert change.summary == (
        "weights with different values (1 of 1): a.weight; the exact outputs move by 0.5; whether the model's"
        " code changed too is not known; the outputs move: relative error of the logits 0.5 is 50.0x the error of the older capture (limit 2.0x)"
    )


def test_changed_files_are_named_together_and_no_check_of_today() -> None:
    weights = {"a.weight": CONTENT.weights["a.weight"].model_copy(update={"hash": "h2"})}
    key = Key(machine=MACHINE, content=CONTENT.model_copy(update={"weights": weights}))
    before = EXPECTED.model_copy(update={"config": {"config.json: rms_norm_eps": 1e-6}})
    eps = {"config": {"config.json: rms_norm_eps": 1e-5}}
    code = with_yardstick(MOVED)
    both = find_change(before, code.model_copy(update=eps | {"key": key}))
    assert both.answer == (
        "config.json: rms_norm_eps 1e-06 → 1e-05, and the other weights: the exact outputs move by 0.5;"
        " whether the model's code changed too is not known"
    )
    for update in ({"key": key}, eps, eps | {"key": key}):
        now = code.model_copy(update=update)
        text = change_as_markdown(before, now, find_change(before, now))
        assert "To find the operation" not in text
        assert "Config.json" not in text
    assert "OLD_PYTHON -m assay.cli check generate" in change_as_markdown(
        EXPECTED, code, find_change(EXPECTED, code)
    )


def test_hidden_change_of_the_code_is_searched_in_float32() -> None:
    verdict, _, change = judge_pair(EXPECTED, with_yardstick(distributions(*[off(NOISE / 10)] * 2)))
    assert (change.kind, change.is_over_limit) == ("break", False)
    (step,) = verdict.next_steps
    assert "--candidate acme/float32 --candidate-python NEW_PYTHON" in str(step.command)


def test_check_against_itself_is_not_advised() -> None:
    origin = EXPECTED.provenance.model_copy(update={"run": "cpu/float32"})
    now = captured(NOISE, 5 * NOISE, provenance=origin)
    text = change_as_markdown(EXPECTED, now, find_change(EXPECTED, now))
    assert text.count("check generate") == text.count("--candidate-python NEW_PYTHON") == 1


def test_texts_are_compared_up_to_their_first_different_token() -> None:
    layers = {"exact_layers": {"a": [2, 1, 1]}, "layers": {"a": 0.1}}
    before = EXPECTED.model_copy(update=layers)
    layers = {"exact_layers": {"a": [2, 1, 2]}, "layers": {"a": 0.9}}
    now = with_yardstick(MOVED, tokens=[[[1, 0]]]).model_copy(update=layers)
    verdict, _, change = judge_pair(before, now)
    assert change.kind == "break"
    assert change.coverage == ", over 1 of 2 tokens: later ones follow other texts"
    assert {token.position for token in change.moved} == {0}
    # Modules read all tokens: other texts explain their other values.
    assert (verdict.headline, verdict.location) == ("break: over the limits of OLD", None)
    assert change.answer.endswith(": the exact outputs move by 0.5")
    text = change_as_markdown(before, now, change)
    assert "The modules are not compared, because they also read the later tokens." in text

    last = with_yardstick(MOVED, tokens=[[[0, 1]]]).model_copy(update=layers)
    assert find_change(before, last).module == "a"  # nothing reads the last token


def test_ids_that_only_one_capture_kept_join_the_rest() -> None:
    # Kept ids 0 and 1 with log-probabilities -1 and -3, the rest -2; now 0 and 2.
    part = common_part(
        EXPECTED.signature,
        EXPECTED.signature.model_copy(update={"top_ids": [[[[0, 2], [0, 2]]]]}),
    )
    assert part is not None
    assert part.expected.top_ids == [[[[0], [0]]]]
    rest = math.log(math.exp(-2) + math.exp(-3))
    ((row,),) = part.expected.yardstick.log_probabilities
    assert row == [pytest.approx([-1, rest])] * 2
    other = EXPECTED.signature.model_copy(update={"top_ids": [[[[2, 3], [0, 1]]]]})
    assert common_part(EXPECTED.signature, other) is None


def test_equal_digits_are_not_printed_for_different_values() -> None:
    now = captured(NOISE, 1.00001 * NOISE)
    text = change_as_markdown(EXPECTED, now, find_change(EXPECTED, now))
    assert "| -3.01 | -3.0100001 |" in text


def test_pull_request_shows_the_change_and_its_environment() -> None:
    before = EXPECTED.provenance
    provenance = before.model_copy(
        update={
            "versions": {"torch": "2.14.0", "driver": "7"},
            "process": {"date": "2026-02-01", "cpu": "C2", "variables": {"OMP_NUM_THREADS": "4"}},
            "approved_by": "Ada",
            "reason": "new driver",
        }
    )
    actual = captured(NOISE, 5 * NOISE, provenance=provenance)
    text = change_as_markdown(EXPECTED, actual, find_change(EXPECTED, actual))
    assert (
        text
        == """### micro:llama on acme/bfloat16: break

The run is less accurate: the exact outputs are the same; another rounding (torch 2.13.0 → 2.14.0) explains an error of up to 3 limits, and so does a small fault of a library; over a limit: relative error of the logits 3.61e-2 is 3.61x the error of the older capture (limit 2.0x).

| statistic | error | ratio to the older error | limit |
|---|---|---|---|
| logits-error | 3.61e-2 | 3.61x **over** | 2.0x |
| logits-worst | 5e-2 | 5.0x **over** | 3.0x |
| logits-whole | 3.61e-2 | 3.61x **over** | 2.0x |

Tokens that moved most (in units of the older error):

| batch, row, token | units | id | log-probability before | now |
|---|---|---|---|---|
| 0, 0, 1 | 4.0 | 0 | -0.99 | -0.95 |

One of the captures has no errors of modules.

To find the operation:

```text
assay check generate micro:llama --reference cpu/float32 --candidate acme/bfloat16
```

To find the operation. OLD_PYTHON is the Python of an environment with the unedited packages of the capture; it runs the reference, and NEW_PYTHON the candidate:

```text
OLD_PYTHON -m assay.cli check generate micro:llama --reference cpu/float32 --candidate acme/bfloat16 --candidate-python NEW_PYTHON
```

Other changes since the older capture:

- torch 2.13.0 → 2.14.0
- cpu absent → C2
- variable OMP_NUM_THREADS absent → 4

Provenance:

- before: unknown date, 1 capture, not approved
- now: 2026-02-01, 1 capture, approved by Ada: new driver
"""
    )


def test_different_prompts_are_counted_and_the_first_is_named() -> None:
    content = CONTENT.model_copy(update={"unpadded_hash": "u"})
    before = EXPECTED.model_copy(
        update={"key": Key(machine=MACHINE, content=content), "prompts": [[1], [2], [3]]}
    )
    other = Key(machine=MACHINE, content=content.model_copy(update={"unpadded_hash": "u2"}))
    for prompts, told in (
        ([[1], [4], [3], [5]], "2 of 4 (3 own prompts → 4 own prompts), the first is prompt 1"),
        ([[1], [2], [4]], "1 of 3, the first is prompt 2"),
        ([], "3 own prompts → built-in prompts"),
    ):
        now = before.model_copy(update={"key": other, "prompts": prompts})
        verdict, _, change = judge_pair(before, now)
        assert change.content[0].startswith(f"different prompts: {told}")
        assert list_steps(*verdict.next_steps) == (
            "capture both with the same prompts and settings, then diff them again"
        )


def test_a_key_that_shortens_the_built_in_prompts_is_named_and_not_the_tokenizer() -> None:
    key, inputs = "config.json: max_position_embeddings", [[7]] * CONTENT.settings.num_prompts
    content = CONTENT.model_copy(update={"prompts_hash": "p2"})
    before = EXPECTED.model_copy(update={"config": {key: 2048}, "inputs": [*inputs, [7] * 1040]})
    now = EXPECTED.model_copy(
        update={
            "config": {key: 512},
            "inputs": [*inputs, [7] * 508],
            "key": Key(machine=MACHINE, content=content),
        }
    )
    assert find_change(before, now).summary == (
        "different built-in prompts: 1 of 5, the first is prompt 4 at its token 508 (both counted from 0): id 7 → none,"
        " because of config.json: max_position_embeddings 2048 → 512"
    )


def test_another_name_of_the_model_is_a_change() -> None:
    verdict, _, change = judge_pair(EXPECTED, EXPECTED.model_copy(update={"model": "mut/llama"}))
    assert (change.kind, verdict.notes) == ("noise", ["model micro:llama → mut/llama"])


def test_a_dropped_approval_is_a_change() -> None:
    approved = EXPECTED.provenance.model_copy(update={"approved_by": "Ada"})
    before = EXPECTED.model_copy(update={"provenance": approved})
    verdict, _, _ = judge_pair(before, EXPECTED)
    assert verdict.notes == ["approved by Ada → not approved"]


def test_a_break_ends_with_the_command_that_finds_the_operation() -> None:
    verdict, _, _ = judge_pair(EXPECTED, captured(NOISE, 5 * NOISE))
    check = "check generate micro:llama --reference cpu/float32 --candidate acme/bfloat16"
    assert list_steps(*verdict.next_steps) == (
        f"to find the operation:\n  assay {check}\nto find the operation. OLD_PYTHON is the Python of an environment"
        " with the unedited packages of the capture; it runs the reference, and NEW_PYTHON the candidate:\n"
        f"  OLD_PYTHON -m assay.cli {check} --candidate-python NEW_PYTHON"
    )


def test_captures_in_two_dtypes_name_the_commands_that_compare_them() -> None:
    machine = MACHINE.model_copy(update={"dtype": "float32"})
    origin = EXPECTED.provenance.model_copy(update={"run": "acme/float32"})
    update = {"key": Key(machine=machine, content=CONTENT), "provenance": origin}
    verdict, _, change = judge_pair(EXPECTED.model_copy(update=update), EXPECTED)
    assert change.content == ["dtype float32 → bfloat16"]
    assert list_steps(*verdict.next_steps) == (
        "to judge acme/bfloat16 by a reference:\n"
        "  assay check generate micro:llama --reference cpu/float32 --candidate acme/bfloat16\n"
        "to see a change, capture NEW on acme/float32 like OLD, then diff again:\n"
        "  assay expect capture micro:llama --run acme/float32 --output NEW.json"
    )


def test_every_command_runs_the_recorded_prompts() -> None:
    before, now = (
        one.model_copy(update={"prompts": [[1]]}) for one in (EXPECTED, captured(NOISE, 5 * NOISE))
    )
    verdict, _, change = judge_pair(before, now, "o.json", "n.json")
    assert all("--prompts n.json" in step.command for step in verdict.next_steps)
    assert change_as_markdown(before, now, change, "n.json").count("--prompts n.json") == 2
    machine = MACHINE.model_copy(update={"dtype": "float32"})
    other = before.model_copy(update={"key": Key(machine=machine, content=CONTENT)})
    verdict, _, _ = judge_pair(other, now, "o.json", "n.json")
    assert all("--prompts n.json" in step.command for step in verdict.next_steps)
