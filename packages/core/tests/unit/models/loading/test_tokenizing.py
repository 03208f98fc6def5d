"""Text to ids and back."""

from pathlib import Path

import pytest

from assay.errors import UsageError
from assay.models.loading.tokenizing import byte_tokenizer, find_tokenizing


def test_encoded_text_decodes_to_itself() -> None:
    tokenizing = byte_tokenizer(starts_with_bos=False)
    assert tokenizing.encode("aé🐕") == [0x61, 0xC3, 0xA9, 0xF0, 0x9F, 0x90, 0x95]
    assert tokenizing.decode(tokenizing.encode("aé🐕")) == "aé🐕"


def test_begin_token_is_first_and_special_ids_decode_to_nothing() -> None:
    tokenizing = byte_tokenizer(starts_with_bos=True)
    assert tokenizing.encode("a") == [256, 97]
    assert tokenizing.decode([256, 97, 257, 258]) == "a"


def test_half_a_character_decodes_to_a_replacement() -> None:
    assert (
        byte_tokenizer(starts_with_bos=False).decode([0x61, 0xC3]) == "a\N{REPLACEMENT CHARACTER}"
    )


def test_tokenizers_that_encode_differently_have_different_hashes() -> None:
    hashes = {byte_tokenizer(starts_with_bos=value).hash for value in (False, True)}
    assert len(hashes) == 2


def test_small_vocabulary_without_tokenizer_asks_for_ids(tmp_path: Path) -> None:
    tokenizing = find_tokenizing(
        tmp_path, "tiny", vocab_size=255, bos_token_id=None, remote_code="refuse"
    )
    assert tokenizing.kind == "none"
    with pytest.raises(UsageError, match=r"model tiny has no tokenizer.*give prompts as token ids"):
        tokenizing.encode("a")
    assert tokenizing.decode([3, 14]) == "3 14"


def test_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match=r"tokenizer\.json\) cannot be loaded"):
        find_tokenizing(tmp_path, "x", vocab_size=300, bos_token_id=None, remote_code="refuse")


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
    tokenizing = find_tokenizing(
        tmp_path, "x", vocab_size=300, bos_token_id=None, remote_code="refuse"
    )
    assert tokenizing.kind == "own"
    assert tokenizing.encode("green red blue") == [3, 2, 1]
    assert tokenizing.decode([2, 3]) == "red green"
    assert tokenizing.pad_token_id == 0
    assert tokenizing.encode_chat is None


def test_chat_template_is_applied(tmp_path: Path) -> None:
    template = "{% for message in messages %}red {{ message.content }} {% endfor %}"
    write_word_tokenizer(tmp_path, template)
    tokenizing = find_tokenizing(
        tmp_path, "x", vocab_size=300, bos_token_id=None, remote_code="refuse"
    )
    assert tokenizing.encode_chat is not None
    assert tokenizing.encode_chat([{"role": "user", "content": "green"}]) == [2, 3]
