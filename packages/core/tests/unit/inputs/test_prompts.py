"""Prompts from files, and our own."""

import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay.inputs import ModelLimits, Prompt, built_in_texts, load_prompts

LIMITS = ModelLimits(vocab_size=260, max_positions=20, pad_token_id=258)


def encode(text: str) -> list[int]:
    return list(text.encode())


def encode_chat(messages: Sequence[Mapping[str, str]]) -> list[int]:
    return [256, *encode("".join(message["content"] for message in messages)), 257]


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str], list[Prompt]]:
    def load_text(text: str) -> list[Prompt]:
        file = tmp_path / "prompts.jsonl"
        file.write_text(text, encoding="utf-8")
        return load_prompts(file, encode, LIMITS, max_new_tokens=4)

    return load_text


def test_prompts_are_texts_or_ids(load: Callable[[str], list[Prompt]]) -> None:
    lines = '{"prompt": "ab"}\n\n{"text": "é", "source": "x"}\n{"ids": [0, 259]}\n'
    assert load(lines) == [
        Prompt("ab", (97, 98)),
        Prompt("é", (0xC3, 0xA9)),
        Prompt(None, (0, 259)),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "2: not JSON: "),
        ("[1, 2]", "2: not a JSON object"),
        ('{"question": "a"}', "2: needs an object with one of the keys"),
        ('{"prompt": "a", "ids": [1]}', "2: needs an object with one of the keys"),
        ('{"prompt": 3}', "2: prompt must be a string, not int"),
        ('{"prompt": ""}', "2: the prompt is empty"),
        ('{"ids": []}', "2: the prompt is empty"),
        ('{"ids": [1.5]}', "2: ids must be a list of whole numbers"),
        ('{"ids": [true]}', "2: ids must be a list of whole numbers"),
        ('{"ids": "1 2"}', "2: ids must be a list of whole numbers"),
        ('{"ids": [7, 260]}', "2: token id 260 at position 1 is outside the vocabulary of 260"),
        ('{"ids": [-1]}', "2: token id -1 at position 0 is outside the vocabulary of 260"),
        (
            '{"prompt": "seventeen letters"}',
            "2: 17 tokens and 4 new ones are over the model's context of 20",
        ),
        ('{"messages": [{"role": "user", "content": "a"}]}', "2: messages need --chat"),
    ],
)
def test_bad_line_is_named(
    load: Callable[[str], list[Prompt]], tmp_path: Path, line: str, message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        load('{"prompt": "fine"}\n' + line)
    assert str(caught.value).startswith(f"{tmp_path / 'prompts.jsonl'}, line {message}")


def test_prompt_that_just_fits_the_context_is_taken(load: Callable[[str], list[Prompt]]) -> None:
    assert len(load('{"prompt": "sixteen letters!"}')[0].ids) == 16


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_empty_file_is_refused(load: Callable[[str], list[Prompt]], text: str) -> None:
    with pytest.raises(UsageError, match="the file is empty"):
        load(text)


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.jsonl", tmp_path):
        with pytest.raises(UsageError, match=r"it is a folder|cannot be read"):
            load_prompts(path, encode, LIMITS, max_new_tokens=4)
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(UsageError, match=r"latin\.jsonl, line 1: not UTF-8"):
        load_prompts(latin, encode, LIMITS, max_new_tokens=4)


def test_chats_go_through_the_template(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    file.write_text(json.dumps({"messages": messages}) + '\n{"prompt": "p"}\n')
    prompts = load_prompts(file, encode, LIMITS, max_new_tokens=4, encode_chat=encode_chat)
    assert prompts == [Prompt("u", (256, 115, 117, 257)), Prompt("p", (256, 112, 257))]


@pytest.mark.parametrize("messages", ["hello", [], ["hello"], [{"role": "user"}]])
def test_messages_need_roles_and_contents(tmp_path: Path, messages: object) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": messages}))
    with pytest.raises(UsageError, match="message"):
        load_prompts(file, encode, LIMITS, max_new_tokens=4, encode_chat=encode_chat)


def test_built_in_set_is_varied() -> None:
    texts = built_in_texts()
    assert len(set(texts)) == len(texts) >= 24
    scripts = {
        unicodedata.name(character).split()[0]
        for text in texts
        for character in text
        if character.isalpha()
    }
    assert {"LATIN", "CYRILLIC", "GREEK", "ARABIC", "DEVANAGARI", "CJK", "HANGUL"} <= scripts
    joined = "".join(texts)
    assert any(ord(character) > 0x1F300 for character in joined)
    assert any(text.startswith("def ") for text in texts)
    assert any(sum(map(str.isdigit, text)) > len(text) / 3 for text in texts)
