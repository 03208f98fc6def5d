import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.errors import UsageError
from assay.models import load_model
from assay.models.config_files import byte_tokenizer as plain
from assay_bench.run_tasks import FAILURE_FILE
from assay_bench.task_worker import (
    _refuse_masked_model,
    byte_tokenizer,
    checked_documents,
    describe_failure,
    find_nan_weights,
    guess_by_frequency,
    nan_calls_of,
    run_lm_eval,
)

TEXTS = ["", "a", "  two\n\n spaces ", "naïve — ☃ 漢字", "\x00\x7f\t", "<bos> is text"]


@pytest.mark.parametrize("starts_with_bos", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_ids_match_assays_byte_tokenizer(text: str, starts_with_bos: bool) -> None:
    tokenizer = byte_tokenizer(258, starts_with_bos=starts_with_bos)
    expected = plain(starts_with_bos=starts_with_bos).encode(text)
    if text == "<bos> is text":
        assert tokenizer.encode("< bos >") == plain(starts_with_bos=starts_with_bos).encode(
            "< bos >"
        )
        return
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected, skip_special_tokens=True) == text


class Echo(torch.nn.Module):
    def forward(self, logits_BTV: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": logits_BTV}


@pytest.mark.parametrize(
    ("value", "position", "expected"),
    [
        (math.nan, -1, 1),
        (math.inf, -1, 1),
        (-math.inf, -1, 0),  # a masked token
        (math.nan, 0, 0),  # a padded position
        (0.0, -1, 0),
    ],
)
def test_calls_that_give_nan_for_the_next_token_are_counted(
    value: float, position: int, expected: int
) -> None:
    model = Echo()
    logits_BTV = torch.zeros(2, 3, 5)
    logits_BTV[1, position, 2] = value
    with nan_calls_of(model) as found:
        model(logits_BTV)
        model(torch.zeros(2, 3, 5))
    model(logits_BTV)  # after the task
    assert len(found) == expected


def test_weights_that_hold_nan_are_named_and_masks_are_not() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    assert find_nan_weights(model) == []
    model.get_parameter("1.weight").data[0, 0] = math.nan
    model.register_buffer("mask", torch.full((2,), -math.inf))
    model.register_buffer("ids", torch.arange(2))
    assert find_nan_weights(model) == ["1.weight"]


def test_guess_by_frequency_is_the_most_probable_one_without_context() -> None:
    texts = [[1, 1, 2], [1], [3, 1]]
    # Four of six tokens are 1, the others occur once.
    often, once = math.log(4 / 6), math.log(1 / 6)
    assert guess_by_frequency(texts) == pytest.approx([2 * often + once, often, often + once])
    assert guess_by_frequency([[7], [7, 7]]) == [0.0, 0.0]
    assert guess_by_frequency([[], []]) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("field", "error", "told"),
    [
        ("choices", "NoneType", "task broken, document 2: "),
        (
            "choises",
            "malformed",
            "doc_to_choice: choises is not a field of the documents (text, label, choices), and",
        ),
    ],
)
def test_failure_in_lm_eval_names_what_is_wrong_with_the_task(
    field: str, error: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third document lacks the options."""
    choices: list[list[str] | None] = [["1", "2"], ["2", "3"], None, ["4", "5"]]
    documents = [{"text": f"{n}+1=", "label": 0, "choices": c} for n, c in enumerate(choices)]
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in documents))
    config = {
        "task": "broken", "dataset_path": "json", "test_split": "test",
        "dataset_kwargs": {"data_files": {"test": str(data)}}, "output_type": "multiple_choice",
        "doc_to_text": "text", "doc_to_choice": field, "doc_to_target": "label",
    }  # fmt: skip
    (tmp_path / "broken.yaml").write_text(json.dumps(config))
    monkeypatch.setenv(FAILURE_FILE, str(tmp_path / "failure.txt"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    words = ["run", "--model", "dummy", "--tasks", "broken", "--include_path", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["lm_eval", *words])
    with pytest.raises(Exception, match=error):
        run_lm_eval()
    message = (tmp_path / "failure.txt").read_text()
    assert message.startswith(told), message


CHOICES = ["one", "two", "three", "four"]
RULE = "; a label is the number of the right choice, from 0, or its text"


def problem_of(labels: list[Any], **config: object) -> str:
    """Return the message about a task, before a model is asked; "" for a sound one."""
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    documents = [{"text": f"{n}", "label": one, "choices": CHOICES} for n, one in enumerate(labels)]
    fields = {
        "task": "own", "test_split": "test", "output_type": "multiple_choice",
        "custom_dataset": lambda **_: {"test": Dataset.from_list(documents)},
        "doc_to_text": "text", "doc_to_choice": "choices", "doc_to_target": "label",
    }  # fmt: skip
    try:
        with checked_documents():
            ConfigurableTask(config=fields | config).build_all_requests()
    except Exception as error:  # noqa: BLE001 - as in the process
        return describe_failure(error)
    return ""


@pytest.mark.parametrize(
    ("labels", "config", "told"),
    [
        ([0, 7, 7], {}, f"document 1: label 7 is not one of 4 choices (2 of 3 documents){RULE}"),
        ([7, 0, 1], {}, f"document 0: label 7 is not one of 4 choices (1 of 3 documents){RULE}"),
        ([1, 2, 4], {}, f"document 2: label 4 is not one of 4 choices (1 of 3 documents){RULE}"),
        ([0, -1, 1], {}, f"document 1: label -1 is not one of 4 choices (1 of 3 documents){RULE}"),
        (["2"], {}, f"document 0: label '2' is not one of 4 choices (1 of 1 documents){RULE}"),
        (["C"], {}, f"document 0: label 'C' is not one of 4 choices (1 of 1 documents){RULE}"),
        ([[0], [5]], {}, f"document 1: label [5] is not one of 4 choices (1 of 2 documents){RULE}"),
        ([[0], []], {}, f"document 1: label [] is not one of 4 choices (1 of 2 documents){RULE}"),
        (
            [0],
            {"doc_to_target": "lable"},
            "doc_to_target: lable is not a field of the documents (text, label, choices)",
        ),
        (
            [0],
            {"doc_to_text": "contxt"},
            "doc_to_text: contxt is not a field of the documents (text, label, choices)",
        ),
    ],
)
def test_documents_without_a_right_answer_are_refused_before_the_model_is_asked(
    labels: list[Any], config: dict[str, str], told: str
) -> None:
    assert problem_of(labels, **config) == f"task own: {told}"


def test_an_error_without_a_sentence_is_told_with_the_code_that_raised_it() -> None:
    assert problem_of([0], test_split="tset") == (
        "'tset' is missing, in test_docs: `return self.dataset[self.config.test_split]`"
    )
    assert problem_of([0], doc_to_target=None) == (
        "a value has the wrong type or is missing, in doc_to_target: `raise TypeError`"
    )
    assert problem_of([0], metric_list=[{"metric": "acc", "aggregation": "mean", "x": 1}]) == ""
    unknown = "Unknown filter 'regx'. Did you mean: regex, regex_pos?"
    filters = [{"name": "x", "filter": [{"function": "regx"}]}]
    assert problem_of([0], filter_list=filters) == unknown


@pytest.mark.parametrize(
    ("labels", "config"),
    [
        ([0, 3], {}),
        (["one", "four"], {}),
        ([[0, 1], [3, 9]], {}),
        ([1], {"doc_to_target": "two"}),
        ([2], {"doc_to_target": "{{label}}"}),
        ([1], {"doc_to_text": "a text of several words"}),
        ([1, 3], {"doc_to_text": "label", "doc_to_target": "text"}),  # a context for each choice
    ],
)
def test_every_form_of_a_right_answer_is_accepted(
    labels: list[Any], config: dict[str, str]
) -> None:
    assert not problem_of(labels, **config)


def test_a_model_that_predicts_masked_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="BertForMaskedLM does not generate, and lm-eval scores"):
        _refuse_masked_model(load_model("micro:bert", dtype="float32"))
    _refuse_masked_model(load_model("micro:llama", dtype="float32"))
