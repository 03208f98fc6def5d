"""Prompts of a shape, from ShareGPT files or the built-in texts."""

import json
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay_expectations.decoders.checking import prompt_lines, read_texts


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
