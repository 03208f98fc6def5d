"""Text to ids."""

import json
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay.models.config_files import (
    byte_tokenizer,
    can_move_outputs,
    find_tokenizing,
    list_setting_changes,
    load_tokenizer,
    record_settings,
    record_tokenizer,
    restore_settings,
)


def test_text_is_encoded_as_bytes() -> None:
    tokenizing = byte_tokenizer(starts_with_bos=False)
    assert tokenizing.encode("aé🐕") == [0x61, 0xC3, 0xA9, 0xF0, 0x9F, 0x90, 0x95]


def test_begin_token_is_first() -> None:
    assert byte_tokenizer(starts_with_bos=True).encode("a") == [256, 97]


def test_tokenizers_that_encode_differently_have_different_hashes() -> None:
    hashes = {byte_tokenizer(starts_with_bos=value).hash for value in (False, True)}
    assert len(hashes) == 2


def test_bytes_are_taken_modulo_a_small_vocabulary(tmp_path: Path) -> None:
    tokenizing = find_tokenizing(tmp_path, vocab_size=90, bos_token_id=None, remote_code="refuse")
    assert tokenizing.kind == "none"
    assert tokenizing.encode("aZ") == [97 - 90, 0]


def test_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match=r"tokenizer\.json\) cannot be loaded"):
        find_tokenizing(tmp_path, vocab_size=300, bos_token_id=None, remote_code="refuse")


def test_folder_without_tokenizer_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^\S+ has no tokenizer files$"):
        load_tokenizer(tmp_path, "refuse")


def write_word_tokenizer(folder: Path, chat_template: str | None = None) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<unk>": 1, "red": 2, "green": 3}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    specials = {"pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, chat_template=chat_template, **specials
    )
    tokenizer.save_pretrained(folder)


def test_folder_s_own_tokenizer_is_used(tmp_path: Path) -> None:
    write_word_tokenizer(tmp_path)
    tokenizing = find_tokenizing(tmp_path, vocab_size=300, bos_token_id=None, remote_code="refuse")
    assert tokenizing.kind == "own"
    assert tokenizing.encode("green red blue") == [3, 2, 1]
    assert tokenizing.pad_token_id == 0
    assert tokenizing.encode_chat is None


def test_layout_of_json_is_no_part_of_the_tokenizer(tmp_path: Path) -> None:
    def hash_here() -> str:
        return find_tokenizing(
            tmp_path, vocab_size=300, bos_token_id=None, remote_code="refuse"
        ).hash

    write_word_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text("no JSON, and not read")
    before = hash_here()
    files = [tmp_path / name for name in ("tokenizer.json", "tokenizer_config.json")]
    for file in files:
        values = json.loads(file.read_text())
        file.write_text(json.dumps(dict(reversed(values.items())), indent=7))
    assert hash_here() == before
    tokenizer = files[0].read_text()
    files[0].write_text(tokenizer.replace("red", "\\u0072ed"))
    assert files[0].read_text() != tokenizer
    assert hash_here() == before
    files[0].write_text(tokenizer.replace('"red"', '"rod"'))
    assert hash_here() != before


@pytest.mark.parametrize("has_own_file", [True, False])
def test_chat_template_is_no_part_of_the_tokenizer(tmp_path: Path, has_own_file: bool) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    config = tmp_path / "tokenizer_config.json"
    hashes, settings = set(), []
    for template in ("{{ messages }}", "{{ messages }}!"):
        write_word_tokenizer(tmp_path, template)
        if not has_own_file:
            (tmp_path / "chat_template.jinja").unlink()
            values = json.loads(config.read_text()) | {"chat_template": template}
            config.write_text(json.dumps(values))
        tokenizing = find_tokenizing(
            tmp_path, vocab_size=300, bos_token_id=None, remote_code="refuse"
        )
        hashes.add(tokenizing.hash)
        settings.append(record_settings(str(tmp_path)))
    assert len(hashes) == 1
    (change,) = list_setting_changes(*settings)
    assert change.startswith("chat template: hash ")
    assert not can_move_outputs(change)


@pytest.mark.parametrize(
    "change", [{"padding_side": "left"}, {"is_local": True, "local_files_only": False}]
)
def test_keys_that_move_no_token_are_no_part_of_the_tokenizer(
    tmp_path: Path, change: dict[str, object]
) -> None:
    """transformers 5.24 stores how a tokenizer was loaded when it saves it again."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    write_word_tokenizer(tmp_path)
    config = tmp_path / "tokenizer_config.json"

    def facts() -> tuple[str, dict[str, str]]:
        found = find_tokenizing(tmp_path, vocab_size=300, bos_token_id=None, remote_code="refuse")
        return found.hash, record_tokenizer(str(tmp_path))

    before = facts()
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    assert facts() == before
    config.write_text(json.dumps(json.loads(config.read_text()) | {"add_prefix_space": True}))
    assert facts() != before


def test_chat_template_is_applied(tmp_path: Path) -> None:
    template = "{% for message in messages %}red {{ message.content }} {% endfor %}"
    write_word_tokenizer(tmp_path, template)
    tokenizing = find_tokenizing(tmp_path, vocab_size=300, bos_token_id=None, remote_code="refuse")
    assert tokenizing.encode_chat is not None
    assert tokenizing.encode_chat([{"role": "user", "content": "green"}]) == [2, 3]


def test_recorded_settings_are_restored(tmp_path: Path) -> None:
    then = {"eps": 1e-6, "rope": {"theta": 1.0}, "dtype": "float32", "ids": [1]}
    (tmp_path / "config.json").write_text(json.dumps(then))
    recorded = record_settings(str(tmp_path))
    now = {"eps": 1e-5, "rope": {"kind": "new"}, "dtype": "bfloat16", "ids": [1], "added": True}
    assert restore_settings(now, recorded)
    assert now == then | {"dtype": "bfloat16"}
    assert not restore_settings(then | {"key.with.points": 1}, recorded)


def test_null_is_another_value_than_none_and_is_restored(tmp_path: Path) -> None:
    """`sliding_window: null` is no window; without the key, Mistral has one of 4,096."""
    (tmp_path / "config.json").write_text('{"sliding_window": null}')
    recorded = record_settings(str(tmp_path))
    now_recorded = {"config.json: dtype": None, "config.json: eps": 1}
    assert list_setting_changes(recorded, now_recorded) == [
        "config.json: eps absent → 1",
        "config.json: sliding_window null → absent",
    ]
    now: dict[str, object] = {}
    assert restore_settings(now, recorded)
    assert now == {"sliding_window": None}


def test_older_record_without_nulls_says_nothing_of_them() -> None:
    then = {"config.json: eps": 1, "config.json: dtype": None}
    assert list_setting_changes(then, then | {"config.json: sliding_window": None}) == []
    assert restore_settings({"eps": 1, "sliding_window": None}, then)
