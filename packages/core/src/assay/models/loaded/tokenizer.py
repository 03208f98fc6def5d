"""Check common assumptions about tokenizers, such as one BOS and one pass of the chat template."""

# ruff: noqa: ANN401 - objects of transformers

from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from assay.files import read_json_object

_TEXT = "What is it?"
_MESSAGES = [{"role": "user", "content": _TEXT}]


def check_tokenizer(
    tokenizer: Any, config: Any, eos_token_ids: Sequence[int]
) -> tuple[list[str], list[str]]:
    """Return errors of the tokenizer, and correct properties that are easy to misuse."""
    wrong: list[str] = []
    notes: list[str] = []
    bos = tokenizer.bos_token_id
    if bos is not None and (count := _leading(tokenizer.encode(_TEXT), bos)) > 1:
        wrong.append(f"a text begins with {count} BOS tokens ({tokenizer.bos_token}, id {bos})")
    vocabulary = config.get_text_config().vocab_size
    if (largest := max(tokenizer.get_vocab().values(), default=0)) >= vocabulary:
        notes.append(f"the tokenizer has the id {largest}, the model's vocabulary {vocabulary} ids")
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    if eos is not None and eos_token_ids and eos not in eos_token_ids:
        notes.append(
            f"the tokenizer ends a text with {tokenizer.eos_token} (id {eos}), the model stops at"
            f" {', '.join(map(str, eos_token_ids))}"
        )
    if pad is not None and pad == eos:
        notes.append(
            f"padding is EOS ({tokenizer.eos_token}, id {eos}): labels masked by this id lose the"
            " end of each text; mask by the attention mask"
        )
    if tokenizer.chat_template:
        more_wrong, more_notes = _check_template(tokenizer)
        wrong += more_wrong
        notes += more_notes
    return wrong, notes


def _check_template(tokenizer: Any) -> tuple[list[str], list[str]]:
    try:
        text = tokenizer.apply_chat_template(_MESSAGES, add_generation_prompt=True, tokenize=False)
        encoded = tokenizer.apply_chat_template(
            _MESSAGES, add_generation_prompt=True, return_dict=True
        )
    except Exception as error:  # noqa: BLE001 - the model's author wrote the template
        return [f"the chat template raises {type(error).__name__}: {error}"], []
    ids = list(encoded["input_ids"])
    bos = tokenizer.bos_token_id
    wrong, notes = [], []
    if bos is not None and (count := _leading(ids, bos)) > 1:
        wrong.append(f"a chat begins with {count} BOS tokens ({tokenizer.bos_token}, id {bos})")
    if ids != list(tokenizer.encode(text, add_special_tokens=False)):
        wrong.append("the ids of a chat are not those of the text that its template makes")
    if bos is not None and _leading(tokenizer.encode(text), bos) > _leading(ids, bos) > 0:
        notes.append(
            f"the chat template writes BOS ({tokenizer.bos_token}, id {bos}), and the tokenizer adds"
            " it again: tokenize its text with add_special_tokens=False"
        )
    return wrong, notes


def _leading(ids: Sequence[int], token: int) -> int:
    return len([*takewhile(lambda id_: id_ == token, ids)])


def check_generation_config(folder: Path, model: Any) -> tuple[list[str], list[str]]:
    """Return settings of generation_config.json that `model` lacks, and contradictions to config.json."""
    path = folder / "generation_config.json"
    own = getattr(model, "generation_config", None)
    if not path.is_file() or own is None:
        return [], []
    settings = read_json_object(path)
    wrong = [
        f"{key} is {getattr(own, key, None)!r}, generation_config.json says {value!r}"
        for key, value in settings.items()
        if not key.startswith("_")
        and key != "transformers_version"
        and value is not None
        and getattr(own, key, None) != value
    ]
    ends = [_ends_of_text(one) for one in (settings, read_json_object(folder / "config.json"))]
    if not ends[1] or ends[1] <= ends[0]:
        return wrong, []
    texts = [", ".join(map(str, sorted(one))) or "none" for one in ends]
    note = (
        f"config.json ends a text with the id {texts[1]}, generation_config.json with {texts[0]}:"
        " generation follows generation_config.json"
    )
    return wrong, [note]


def _ends_of_text(settings: Mapping[str, Any]) -> set[int]:
    inner = settings.get("text_config")
    ids = settings.get(
        "eos_token_id", inner.get("eos_token_id") if isinstance(inner, dict) else None
    )
    return {one for one in (ids if isinstance(ids, list) else [ids]) if isinstance(one, int)}
