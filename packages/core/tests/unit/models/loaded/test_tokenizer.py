"""One BOS, one pass of the chat template, an end that can be told from padding; built offline."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast

from assay.models.loaded.tokenizer import check_generation_config, check_tokenizer

WORDS = {"<s>": 0, "</s>": 1, "<pad>": 2, "<unk>": 3, "What": 4, "is": 5, "it": 6, "?": 7}
CONFIG: Any = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=8))
PLAIN = "{% for message in messages %}{{ message.content }} {% endfor %}"
WITH_BOS = "{{ bos_token }}" + PLAIN


def tokenizer_with(template: str = "$A", chat: str | None = None, pad: str = "<pad>") -> Any:
    words = Tokenizer(models.WordLevel(WORDS, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": pad}
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template=chat, **names)


def test_tokenizer_with_one_begin_and_a_template_without_has_no_finding() -> None:
    assert check_tokenizer(tokenizer_with("<s> $A", PLAIN), CONFIG, (1,)) == ([], [])
    assert check_tokenizer(tokenizer_with("$A", WITH_BOS), CONFIG, (1,)) == ([], [])


def test_second_begin_of_a_text_is_named() -> None:
    wrong, _ = check_tokenizer(tokenizer_with("<s> <s> $A"), CONFIG, (1,))
    assert wrong == ["a text begins with 2 BOS tokens (<s>, id 0)"]


def test_second_begin_that_the_template_writes_is_named() -> None:
    chat = "{{ bos_token }}" + WITH_BOS
    wrong, _ = check_tokenizer(tokenizer_with("$A", chat), CONFIG, (1,))
    assert wrong == ["a chat begins with 2 BOS tokens (<s>, id 0)"]


def test_begin_that_template_and_tokenizer_both_write_is_a_note() -> None:
    wrong, notes = check_tokenizer(tokenizer_with("<s> $A", WITH_BOS), CONFIG, (1,))
    assert wrong == []
    note = (
        "the chat template writes BOS (<s>, id 0), and the tokenizer adds it again: tokenize its text"
        " with add_special_tokens=False"
    )
    assert notes == [note]


def test_end_that_is_masked_with_the_padding_is_a_note() -> None:
    _, notes = check_tokenizer(tokenizer_with(pad="</s>"), CONFIG, (1,))
    note = (
        "padding is EOS (</s>, id 1): labels masked by this id lose the end of each text; mask by the"
        " attention mask"
    )
    assert notes == [note]


def test_end_that_the_model_does_not_stop_at_is_a_note() -> None:
    _, notes = check_tokenizer(tokenizer_with(), CONFIG, (6, 7))
    assert notes == ["the tokenizer ends a text with </s> (id 1), the model stops at 6, 7"]


def test_template_that_raises_is_named() -> None:
    wrong, _ = check_tokenizer(
        tokenizer_with(chat="{{ raise_exception('no system') }}"), CONFIG, (1,)
    )
    assert len(wrong) == 1
    assert wrong[0].startswith("the chat template raises TemplateError: no system")


@pytest.mark.parametrize(("temperature", "found"), [(0.7, []), (0.6, ["temperature"])])
def test_generation_settings_are_those_of_the_file(
    tmp_path: Path, temperature: float, found: list[str]
) -> None:
    GenerationConfig(do_sample=True, temperature=0.7, eos_token_id=[1, 2]).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    own = GenerationConfig(do_sample=True, temperature=temperature, eos_token_id=[1, 2])

    wrong, notes = check_generation_config(tmp_path, SimpleNamespace(generation_config=own))
    assert [text.split()[0] for text in wrong] == found
    assert notes == []


@pytest.mark.parametrize(
    ("of_config", "of_generation", "texts"),
    [
        ({"eos_token_id": 257}, {}, ("257", "none")),
        ({"eos_token_id": [1, 257]}, {"eos_token_id": 1}, ("1, 257", "1")),
        ({"text_config": {"eos_token_id": 2}}, {"eos_token_id": None}, ("2", "none")),
        ({"eos_token_id": 257}, {"eos_token_id": [257, 258]}, None),
        ({"eos_token_id": None}, {"eos_token_id": 257}, None),
    ],
)
def test_end_of_text_that_generation_does_not_know_is_a_note(
    tmp_path: Path, of_config: Any, of_generation: Any, texts: tuple[str, str] | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(of_config))
    (tmp_path / "generation_config.json").write_text(json.dumps(of_generation))
    model = SimpleNamespace(generation_config=GenerationConfig(**of_generation))
    wrong, notes = check_generation_config(tmp_path, model)
    assert wrong == []
    note = (
        f"config.json ends a text with the id {texts[0]}, generation_config.json with {texts[1]}:"
        " generation follows generation_config.json"
        if texts
        else ""
    )
    assert notes == ([note] if texts else [])
