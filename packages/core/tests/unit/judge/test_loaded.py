"""The level load: what fails, what is a note, and in which words."""

import pytest

from assay.judge.loaded import judge_load
from assay.models.inspect.report import LoadReport, SetupChanges, UnreadKey, WeightDifference
from assay.verdicts import Outcome

TABLE = WeightDifference(
    name="model.embed_tokens.weight", rows=(0, 7), num_differing=8, num_rows=260, error=1.0,
    largest=1e6,
)  # fmt: skip
ROUNDED = TABLE.model_copy(update={"largest": 1.0})


def clean(**found: object) -> LoadReport:
    return LoadReport.model_validate({"compared": 4, "num_keys": 9} | found)


def test_clean_loads_pass_with_the_number_of_tensors() -> None:
    judged = judge_load([clean(), clean()])
    assert (judged.result.level.verdict, judged.result.level.compared) == (Outcome.PASS, 4)
    assert (judged.result.notes, judged.loading, judged.changed) == ([], [], [])


def test_nothing_compared_is_no_pass() -> None:
    assert judge_load([LoadReport()]).result.level.verdict is Outcome.NOT_COMPARED
    assert judge_load([]).result.level.verdict is None


def test_weights_that_cannot_be_compared_are_no_pass_and_named() -> None:
    judged = judge_load([clean(not_compared=["a.weight (stored as uint8[4], in memory ...)"])])
    assert judged.result.level.verdict is Outcome.NOT_COMPARED
    assert "a.weight (stored as uint8[4]" in (judged.result.level.reason or "")


@pytest.mark.parametrize(
    ("found", "diagnosis", "words"),
    [
        ({"weights": [TABLE]}, "weight-mismatch",
         ("model.embed_tokens.weight differs from the stored value in rows 0 to 7 of 260:"
         " relative error 1.0")),
        ({"weights": [WeightDifference(name="b", problem="not-stored")]}, "weight-mismatch",
         "b is loaded from no tensor of the files"),
        ({"weights": [ROUNDED.model_copy(update={"problem": "varies", "rows": (3, 3), "num_differing": 1})]},
         "weight-mismatch",
         ("model.embed_tokens.weight is in no file, and a second load has other values in row 3 of"
         " 260: it depends on the seed, or was never written")),
        ({"keys": [UnreadKey(key="softcaping", problem="misspelt", nearest="softcapping")]},
         "checkpoint-mismatch",
         ("config.json: no code reads the key softcaping; softcapping, which is read, is not in the"
         " file: its default was used")),
        ({"keys": [UnreadKey(key="rope_theta", problem="overridden", used="500000.0", stored="1e4")]},
         "checkpoint-mismatch", "config.json: rope_theta is 500000.0 in memory, 1e4 in the file"),
        ({"generation": ["temperature is 1.0, generation_config.json says 0.6"]},
         "checkpoint-mismatch", "temperature is 1.0, generation_config.json says 0.6"),
        ({"tokenizer": ["a chat begins with 2 BOS tokens (<s>, id 1)"]}, "inputs-differ",
         "a chat begins with 2 BOS tokens (<s>, id 1)"),
    ],
)  # fmt: skip
def test_what_loading_made_wrong_fails_and_is_said_once(
    found: dict[str, object], diagnosis: str, words: str
) -> None:
    judged = judge_load([clean(**found), clean(**found)])

    (finding,) = judged.loading
    assert (judged.result.level.verdict, judged.result.level.reason) == (Outcome.FAIL, words)
    assert finding.diagnosis == diagnosis
    assert finding.location.phase in ("checkpoint", "inputs")


def test_a_simple_change_of_a_weight_is_named() -> None:
    weight = TABLE.model_copy(update={"change": "It is 2 times the expected one."})
    reason = judge_load([clean(weights=[weight])]).result.level.reason
    assert reason is not None
    assert reason.endswith("; it is 2 times the expected one")


def test_changed_setting_is_named_before_the_buffer_that_is_made_of_it() -> None:
    buffer = TABLE.model_copy(update={"name": "inv_freq", "problem": "not-built"})
    setting = "rope_theta is 500000.0, 10000.0 where its class is built from config.json alone"

    judged = judge_load([clean(weights=[buffer], settings=[setting])])

    assert judged.result.level.reason == f"{setting} and 1 more"


@pytest.mark.parametrize(
    ("found", "note"),
    [
        ({"keys": [UnreadKey(key="norm_topk_prob")]},
         "config.json: no code reads the key norm_topk_prob"),
        ({"keys": [UnreadKey(key="attn_bias", nearest="attention_bias")]},
         "config.json: no code reads the key attn_bias; the nearest that is read is attention_bias"),
        ({"unused": ["lm_head.bias"]},
         "the files hold tensors that the model does not use: lm_head.bias"),
        ({"non_finite": ["a.weight (3 of 384 values)"]},
         "NaN or infinity in loaded weights: a.weight (3 of 384 values)"),
        ({"weights": [ROUNDED]},
         "not rounded to nearest: model.embed_tokens.weight"),
        ({"notes": ["padding is EOS"]}, "padding is EOS"),
    ],
)  # fmt: skip
def test_what_may_be_meant_is_a_note(found: dict[str, object], note: str) -> None:
    judged = judge_load([clean(**found)])
    assert (judged.result.level.verdict, judged.result.notes) == (Outcome.PASS, [note])


def test_changes_after_loading_fail_beyond_their_rounding_only() -> None:
    within = judge_load([clean()], [SetupChanges(weights=[ROUNDED])])
    beyond = judge_load([clean()], [SetupChanges(weights=[TABLE])])

    note = "rounded after loading, before the first forward pass: model.embed_tokens.weight"
    assert (within.result.notes, beyond.result.notes) == ([note], [])
    assert "changed after loading, before the first forward pass" in (
        beyond.result.level.reason or ""
    )
    assert within.result.level.verdict is Outcome.PASS
    assert beyond.result.level.verdict is Outcome.FAIL
    assert (beyond.loading, [one.location.parameter for one in beyond.changed]) == (
        [],
        ["model.embed_tokens.weight"],
    )
    assert beyond.changed[0].location.phase == "forward"


def test_rows_that_are_not_neighbours_are_counted() -> None:
    scattered = TABLE.model_copy(update={"rows": (2, 250), "num_differing": 3})
    level = judge_load([clean(weights=[scattered])]).result.level
    assert "3 of the rows 2 to 250 of 260" in (level.reason or "")
