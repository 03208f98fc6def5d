"""Options and references of the decoder suite."""

import json
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay.files import read_toml_record
from assay_expectations.decoders import (
    DEFAULT_SHAPES,
    DecoderOptions,
    Shape,
    Thresholds,
    micro_model,
    options_from,
    prompt_lines,
    read_texts,
)


def read(**variables: str) -> DecoderOptions:
    return options_from({f"FMS_TEST_SHAPES_{name}": value for name, value in variables.items()})


def test_defaults_without_variables() -> None:
    assert read() == DecoderOptions()
    assert len(DEFAULT_SHAPES) == 4


def test_published_variables_set_all_options() -> None:
    options = read(
        COMMON_MODEL_PATHS="mistralai/Mistral-7B-Instruct-v0.3,/models/llama",
        USE_MICRO_MODELS="0",
        COMMON_BATCH_SIZES="1,2",
        COMMON_SEQ_LENGTHS="64",
        COMMON_MAX_NEW_TOKENS="16",
        METRICS_THRESHOLD="2.8364005851745624,0.0007839603102183846",
        FAILURE_THRESHOLD="0.02",
        VALIDATION_INFO_DIR="/kept",
        CUMULATIVE_TEST_TOKENS_PER_SEQUENCE="40",
        FORCE_VALIDATION_LEVEL_1="1",
        SAVE_VALIDATION_INFO_OUTPUTS="1",
    )
    assert options == DecoderOptions(
        models=("mistralai/Mistral-7B-Instruct-v0.3", "/models/llama"),
        shapes=(Shape(1, 64, 16), Shape(2, 64, 16)),
        tokens_per_row=40,
        thresholds=Thresholds(
            metrics={"cross_entropy": 2.8364005851745624, "diff_mean": 0.0007839603102183846},
            failure_rate=0.02,
        ),
        references=Path("/kept"),
    )
    # 40 tokens per row need three batches of 16.
    assert options.num_prompts(Shape(2, 64, 16)) == 6


def test_one_batch_is_the_default() -> None:
    assert DecoderOptions().num_prompts(Shape(4, 64, 16)) == 4


def test_assertion_can_be_skipped() -> None:
    options = read(METRICS_THRESHOLD="3.0,0.001", SKIP_ASSERTIONS="CE")
    assert options.thresholds.metrics == {"diff_mean": 0.001}


@pytest.mark.parametrize(
    ("name", "micro"),
    [
        ("mistralai/Mistral-7B-Instruct-v0.3", "micro:mistral"),
        ("/models/mixtral-8x7b/", "micro:mixtral"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "micro:mixtral"),
        ("google/gemma-2-9b", "micro:gemma2"),
        ("bigcode/gpt_bigcode-santacoder", "micro:gpt-bigcode"),
        ("FacebookAI/roberta-base", "micro:roberta"),
        ("/llama/checkpoint-4", "micro:llama"),
        ("micro:gemma2", "micro:gemma2"),
    ],
)
def test_micro_model_of_a_family(name: str, micro: str) -> None:
    assert micro_model(name) == micro
    assert read(COMMON_MODEL_PATHS=name).models == (micro,)


def test_family_without_a_micro_model_is_an_error() -> None:
    with pytest.raises(
        UsageError, match=r"^there is no micro model for acme/unknown; micro models: bert"
    ):
        read(COMMON_MODEL_PATHS="acme/unknown")


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("COMMON_BATCH_SIZES", "four", "positive integers"),
        ("COMMON_SEQ_LENGTHS", "64,0", "positive integers"),
        ("METRICS_THRESHOLD", "3.0", "two numbers, for cross_entropy and diff_mean"),
        ("METRICS_THRESHOLD", "3.0,nan", "positive numbers"),
        ("FAILURE_THRESHOLD", "1%", "positive numbers"),
        ("FAILURE_THRESHOLD", "1", "one share below 1"),
        ("FAILURE_THRESHOLD", "0.01,0.5", "one share below 1"),
        ("CUMULATIVE_TEST_TOKENS_PER_SEQUENCE", "40,80", "one number"),
        ("USE_MICRO_MODELS", "yes", "0 or 1"),
    ],
)
def test_invalid_variable_is_named(name: str, value: str, wanted: str) -> None:
    with pytest.raises(UsageError) as raised:
        read(**{name: value})
    assert str(raised.value) == f"FMS_TEST_SHAPES_{name} is {value!r}; expected: {wanted}"


@pytest.mark.parametrize("text", ["4x64", "4x64x0", "4x64x-1", "axbxc", ""])
def test_a_shape_has_three_sizes(text: str) -> None:
    with pytest.raises(UsageError, match="such as 4x64x16"):
        Shape.parse(text)


FILE = """
failure_rate = 0.02
false_failure_bound = 0.1
[thresholds]
cross_entropy = 2.5
diff_mean = 0.001
"""


def test_file_of_calibrate_is_read(tmp_path: Path) -> None:
    file = tmp_path / "thresholds.toml"
    file.write_text(FILE)
    read = read_toml_record(Thresholds, file)
    assert (read.metrics, read.failure_rate) == ({"cross_entropy": 2.5, "diff_mean": 0.001}, 0.02)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[thresholds", "Expected"),
        ("", "thresholds: it is missing"),
        ("failure_rate = 1.5\n[thresholds]", "failure_rate: "),
        (
            "failure_rte = 0.5\n[thresholds]",
            "unknown key 'failure_rte'; did you mean failure_rate?",
        ),
        ("[thresholds]\ncosine = 1.0", "thresholds: the name 'cosine': it must match"),
        ("[thresholds]\ndiff_mean = nan", "thresholds.diff_mean"),
    ],
)
def test_malformed_file_is_an_error(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "thresholds.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=problem):
        read_toml_record(Thresholds, file)


def test_first_message_of_each_line_is_read(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    chat = {
        "messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "No"}]
    }
    file.write_text("\n".join(map(json.dumps, [{"prompt": "What?"}, chat, {"ids": [3]}])))
    assert read_texts(file) == ["What?", "Why?"]


def test_texts_are_joined_until_they_are_long_enough() -> None:
    lines = [json.loads(line) for line in prompt_lines(["aaaa", "bb"], 2, 1).splitlines()]
    # One token is counted as 8 characters.
    assert [line["text"] for line in lines] == ["aaaa\n\nbb\n\naaaa", "bb\n\naaaa\n\nbb"]


def test_file_without_texts_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"ids": [3]}')
    with pytest.raises(UsageError, match=r"prompts .*prompts\.jsonl: the file contains no text"):
        read_texts(file)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.json: cannot be read"):
        read_texts(tmp_path / "absent.json")
