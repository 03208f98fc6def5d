"""Options and references of the decoder suite."""

import json
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay_expectations.decoders import (
    DEFAULT_SHAPES,
    DecoderCheck,
    DecoderOptions,
    Shape,
    Thresholds,
    micro_model,
    options_from,
    prompt_lines,
    read_texts,
    read_thresholds,
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
[shapes.4x64x16]
failure_rate = 0.05
thresholds = { diff_mean = 0.01 }
"""


def test_shape_overrides_the_thresholds_for_all_shapes(tmp_path: Path) -> None:
    file = tmp_path / "thresholds.toml"
    file.write_text(FILE)
    for_all, by_shape = read_thresholds(file)
    options = DecoderOptions(thresholds=for_all, shape_thresholds=by_shape)

    def thresholds_of(shape: Shape) -> Thresholds:
        return DecoderCheck("micro:llama", shape, "cpu/float32", tmp_path, options).thresholds

    assert thresholds_of(Shape(1, 64, 16)) == Thresholds(
        metrics={"cross_entropy": 2.5, "diff_mean": 0.001}, failure_rate=0.02
    )
    assert thresholds_of(Shape(4, 64, 16)) == Thresholds(
        metrics={"cross_entropy": 2.5, "diff_mean": 0.01}, failure_rate=0.05
    )


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
        ("[thresholds]\ndiff_mean = 1.0\n[shapes.4x64.thresholds]\n", "shape '4x64'"),
    ],
)
def test_malformed_file_is_an_error(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "thresholds.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=problem):
        read_thresholds(file)


def write(path: Path, conversations: object) -> Path:
    file = path / "share_gpt.json"
    file.write_text(json.dumps(conversations), encoding="utf-8")
    return file


def asked(text: str, who: str = "human") -> dict[str, object]:
    return {
        "id": "1",
        "conversations": [{"from": who, "value": text}, {"from": "gpt", "value": "no"}],
    }


def test_first_human_message_is_read(tmp_path: Path) -> None:
    file = write(tmp_path, [asked("What?"), asked("I am", "gpt"), asked("Why?")])
    assert read_texts(file) == ["What?", "Why?"]


def test_texts_are_joined_until_they_are_long_enough() -> None:
    lines = [json.loads(line) for line in prompt_lines(["aaaa", "bb"], 2, 1).splitlines()]
    # One token is counted as 8 characters.
    assert [line["text"] for line in lines] == ["aaaa\n\nbb\n\naaaa", "bb\n\naaaa\n\nbb"]


@pytest.mark.parametrize(
    ("conversations", "problem"),
    [
        ([], "expected a list of conversations"),
        ({"a": 1}, "expected a list of conversations"),
        ([{"text": "no"}], "0: expected an object with a list `conversations`"),
        ([{"conversations": [{"from": "human"}]}], "0: expected messages with `from`"),
        ([asked("I am", "gpt")], "no conversation begins with a human message"),
    ],
)
def test_malformed_file_is_named(tmp_path: Path, conversations: object, problem: str) -> None:
    file = write(tmp_path, conversations)
    with pytest.raises(UsageError, match=f"{file}.*{problem}"):
        read_texts(file)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.json: cannot be read"):
        read_texts(tmp_path / "absent.json")
