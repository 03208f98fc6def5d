"""Keys and files of expectations."""

import json
from pathlib import Path
from typing import Any

import pytest

from assay.files import DiskError, UnreadableFileError
from assay_expectations.differences import (
    content_differences,
    describe_built_in,
    has_same_inputs,
    machine_differences,
)
from assay_expectations.records import (
    Expectation,
    Weight,
    place_of,
    read_expectation,
    write_expectation,
)
from packages.expectations.tests.unit.sample_expectations import (
    CONTENT,
    MACHINE,
    WEIGHT,
    expectation,
)

OTHER_VALUES = WEIGHT.model_copy(update={"hash": "h2"})
TRANSPOSED = WEIGHT.model_copy(update={"shape": [3, 2], "hash": "h3"})


def with_weights(**weights: Weight) -> list[str]:
    """The differences from a checkpoint with the weights "a" and "b"."""
    named = {name: weights[name] for name in weights}
    expected = CONTENT.model_copy(update={"weights": {"a": WEIGHT, "b": OTHER_VALUES}})
    return content_differences(expected, CONTENT.model_copy(update={"weights": named}))


def test_equal_content_has_no_differences() -> None:
    assert content_differences(CONTENT, CONTENT.model_copy(deep=True)) == []


def test_renamed_weight_is_found_by_its_values() -> None:
    assert with_weights(a=WEIGHT, c=OTHER_VALUES) == ["renamed weights (1): b is now c"]


def test_missing_and_new_weights_are_named() -> None:
    assert with_weights(a=WEIGHT, c=TRANSPOSED) == [
        "missing weights (1): b",
        "new weights (1): c",
    ]


def test_changed_values_and_formats_are_distinguished() -> None:
    assert with_weights(a=TRANSPOSED, b=WEIGHT) == [
        "weights with a different dtype or shape (1): a is BF16 [3, 2], expected BF16 [2, 3]",
        "weights with different values (1 of 2): b",
    ]


def test_one_tensor_is_named_for_each_change_of_format() -> None:
    wide = WEIGHT.model_copy(update={"dtype": "F32"})
    before = CONTENT.model_copy(update={"weights": dict.fromkeys("abc", WEIGHT)})
    after = CONTENT.model_copy(update={"weights": {"a": wide, "b": wide, "c": TRANSPOSED}})
    (told,) = content_differences(before, after)
    assert told == (
        "weights with a different dtype or shape (3): a and 1 more are F32, expected BF16, c is BF16 [3, 2], expected"
        " BF16 [2, 3]"
    )


def test_different_inputs_and_settings_are_named() -> None:
    settings = CONTENT.settings.model_copy(update={"seed": 1})
    other = CONTENT.model_copy(
        update={"tokenizer_hash": "x", "prompts_hash": "x", "settings": settings}
    )
    assert content_differences(CONTENT, other) == [
        "different tokenizer",
        "seed 0 → 1",
    ]


@pytest.mark.parametrize(
    ("weights", "is_same"),
    [
        ({"a.weight": WEIGHT, "extra.weight": WEIGHT}, True),
        ({"a.weight": WEIGHT.model_copy(update={"hash": "h2"})}, True),
        # Of another vocabulary, whose ids have other meanings.
        ({"a.weight": WEIGHT.model_copy(update={"shape": [4, 3]})}, False),
    ],
)
def test_models_of_equal_shapes_run_the_same_tokens(
    weights: dict[str, Weight], *, is_same: bool
) -> None:
    other = CONTENT.model_copy(update={"weights": weights, "tokenizer_hash": "t2"})
    assert has_same_inputs(CONTENT, other) is has_same_inputs(other, CONTENT) is is_same
    assert not has_same_inputs(CONTENT, other.model_copy(update={"prompts_hash": "p2"}))


def test_machines_differ_in_named_parts() -> None:
    other = MACHINE.model_copy(update={"architecture": "a2"})
    assert machine_differences(MACHINE, other) == ["architecture a1 → a2"]
    assert machine_differences(MACHINE, MACHINE) == []


SCHEMA_FILE = Path(__file__).parents[4] / "docs" / "expectation.schema.json"


def test_expectation_round_trips(tmp_path: Path) -> None:
    written = expectation(3)
    path = write_expectation(written, tmp_path / "deep")
    assert path == tmp_path / "deep/acme-a1-bfloat16-micro-llama.json"
    assert read_expectation(path).model_dump(exclude={"hash"}) == written.model_dump(
        exclude={"hash"}
    )


def test_named_file_is_used(tmp_path: Path) -> None:
    assert write_expectation(expectation(), tmp_path / "x.json") == tmp_path / "x.json"


def test_each_weight_has_its_own_line(tmp_path: Path) -> None:
    written = expectation()
    weights = {f"layers.{n}.weight": written.key.content.weights["a.weight"] for n in range(9)}
    content = written.key.content.model_copy(update={"weights": weights})
    key = written.key.model_copy(update={"content": content})
    path = write_expectation(written.model_copy(update={"key": key}), tmp_path / "x.json")

    lines = [line.strip(" ,") for line in path.read_text().splitlines()]
    assert '"layers.7.weight": {"dtype": "BF16", "shape": [2, 3], "hash": "h"}' in lines


def test_older_files_keep_their_hash(tmp_path: Path) -> None:
    older = expectation().model_copy(update={"config": {}})
    path = write_expectation(older, tmp_path / "x.json")
    record = json.loads(path.read_text())
    newer = ("layers", "exact_layers", "config", "prompts")
    assert not any(name in record for name in newer)
    assert not {"prompt_length", "chat"} & record["key"]["content"]["settings"].keys()
    whole = expectation().model_copy(update={"config": {"config.json: a": 1}})
    assert "config" in json.loads(write_expectation(whole, path).read_text())


OTHER_IDS = "built-in prompts with other token ids or padding"


def test_padding_is_no_part_of_prompts_that_both_files_know_without_it() -> None:
    one = CONTENT.model_copy(update={"unpadded_hash": "u"})
    other = one.model_copy(update={"prompts_hash": "p2"})
    assert content_differences(one, other) == []
    assert content_differences(CONTENT, other) == [OTHER_IDS]
    rows = one.model_copy(update={"unpadded_hash": "u2"})
    assert content_differences(one, rows) == [OTHER_IDS]


def test_different_built_in_prompts_name_the_key_that_sizes_them() -> None:
    then, now = ([[7] * size for size in sizes] for sizes in ((9, 5, 1040), (8, 5, 508)))
    keys = ["config.json: rms_norm_eps 1e-06 → 1e-05", "config.json: sliding_window 24 → 1040"]
    shorter = "different built-in prompts: 2 of 3, the first is prompt 0 at its token 8 (both counted from 0): id 7 → none"
    assert describe_built_in(then, now, keys) == f"{shorter}, because of {keys[1]}"
    assert describe_built_in(then, now, keys[:1]) == shorter
    assert describe_built_in(then, [then[0], [7, 7, 8, 7, 9], then[2]], keys[:1]) == (
        "different built-in prompts: 1 of 3, the first is prompt 1 at its token 2 (both counted from 0): id 7 → 8"
    )
    assert describe_built_in([], now, keys) == ""  # older files have no record
    other = CONTENT.model_copy(update={"prompts_hash": "p2"})
    assert content_differences(CONTENT, other, built_in=shorter) == [shorter]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/home/ada/models/tiny", "tiny"),
        ("micro:llama?trained=0", "micro-llama-trained-0"),
        ("../models/tiny", "models-tiny"),
        ("org/tiny", "org-tiny"),
    ],
)
def test_file_is_named_after_the_model_not_its_machine(model: str, name: str) -> None:
    made = expectation().model_copy(update={"model": model})
    assert made.name == f"acme-a1-bfloat16-{name}"


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("a.b", "a.b"),
        ("a.b (input)", "a"),
        ("c.d.e (input)", ""),
        ("a (input)", ""),
        ("a.b (output 2)", "a.b"),
        ("a.b (input 3)", "a"),
    ],
)
def test_an_input_is_made_by_the_nearest_caller(name: str, place: str) -> None:
    assert place_of(name, {"", "a", "a.b", "c.d.e"}) == place


def edited(path: Path, edit: dict[str, Any]) -> Path:
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | edit))
    return path


def problem_of(path: Path) -> str:
    with pytest.raises(UnreadableFileError) as raised:
        read_expectation(path)
    return str(raised.value).removeprefix(f"{path}: ")


def test_manually_changed_limit_is_detected(tmp_path: Path) -> None:
    path = write_expectation(expectation(), tmp_path / "x.json")
    limits = {"logits-error": 200.0, "logits-worst": 3.0, "logits-whole": 2.0}
    assert problem_of(edited(path, {"limits": limits})) == (
        "its hash does not match its content, which was edited or merged. To go on, restore it:\n  git checkout"
        f" {path}\ncapture it again:\n  assay expect capture micro:llama --run acme/bfloat16 --output {path}"
        " --reason TEXT"
    )


def test_hash_excludes_provenance(tmp_path: Path) -> None:
    path = write_expectation(expectation(), tmp_path / "x.json")
    record = json.loads(path.read_text())["provenance"]
    edited(path, {"provenance": record | {"approved_by": "Ada", "reason": "reviewed"}})
    assert read_expectation(path).provenance.approved_by == "Ada"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read: No such file or directory. To go on, restore it:\n  git checkout "),
        (b"{", "not JSON: "),
        (b"", "it is empty. To go on, restore it:\n  git checkout "),
        (
            b'{"schema": 2, "limits": {"x": 1}}',
            "model: it is missing. To go on, restore it:\n  git checkout ",
        ),
        (b"\xff\xfe", "not UTF-8 at byte 0"),
        (
            b"[]",
            "it is not an expectation. To go on, move it out of the folder of expectations:\n  mv ",
        ),
        (
            b'{"a": 1}',
            "it is not an expectation. To go on, move it out of the folder of expectations:\n  mv ",
        ),
        (
            b'{"schema": 1, "model": "a/b", "provenance": {"run": "cpu/float32"}}',
            "its schema is 1, but this assay reads schema 2. To go on, capture it again:\n  assay expect capture a/b --run",
        ),
        (
            b"version https://git-lfs.github.com/spec/v1\noid x",
            "it is a pointer of Git LFS, not the file itself. To go on, fetch it:\n  git lfs pull",
        ),
        (b'{"schema": 2}', "model: it is missing"),
    ],
)
def test_other_file_is_an_error_that_names_it(
    tmp_path: Path, content: bytes | None, problem: str
) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    assert problem_of(path).startswith(problem)


def test_truncated_file_is_an_error(tmp_path: Path) -> None:
    path = write_expectation(expectation(), tmp_path / "x.json")
    path.write_bytes(path.read_bytes()[:-40])
    assert problem_of(path).startswith("not JSON: ")


def test_unwritable_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match=r"file/below"):
        write_expectation(expectation(), tmp_path / "file" / "below")


def test_published_schema_matches_the_code() -> None:
    published = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    assert published == Expectation.model_json_schema(), "assay expect schema prints the new one"


CONFIG, FILE = "tokenizer_config.json", "tokenizer.json"


@pytest.mark.parametrize(
    ("now", "differences"),
    [
        ({f"{FILE}: vocabulary": "v2", f"{CONFIG}: split_special_tokens": "l"},
         ["different tokenizer: tokenizer.json: vocabulary"]),
        ({f"{CONFIG}: split_special_tokens": "l"}, ["missing tokenizer files: tokenizer.json"]),
        ({}, ["missing tokenizer files: tokenizer.json, tokenizer_config.json"]),
    ],
)  # fmt: skip
def test_changed_part_of_a_tokenizer_is_named(now: dict[str, str], differences: list[str]) -> None:
    parts = {f"{FILE}: vocabulary": "v", f"{CONFIG}: split_special_tokens": "l"}
    then = CONTENT.model_copy(update={"tokenizer": parts})
    actual = CONTENT.model_copy(update={"tokenizer": now, "tokenizer_hash": "t2"})
    assert content_differences(then, actual) == differences


def test_file_without_parts_of_the_tokenizer_keeps_its_hash() -> None:
    assert "tokenizer" not in expectation().to_json()["key"]["content"]
