"""Functions of users that render chats: correct ones, and known mistakes."""

import itertools
from collections.abc import Sequence
from typing import Any

IGNORED = -100
Messages = Sequence[dict[str, str]]
Rendered = dict[str, list[int]]

_CALLS = itertools.count()


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def _pieces(tokenizer: Any, messages: Messages) -> list[tuple[list[int], bool]]:
    """Return the ids of the text in pieces, each with whether it is the assistant's."""
    bos = tokenizer.bos_token if tokenizer.chat_template.startswith(tokenizer.bos_token) else ""
    pieces = [(_encode(tokenizer, bos), False)]
    for message in messages:
        learned = message["role"] == "assistant"
        pieces += [
            (_encode(tokenizer, f"<|im_start|>{message['role']}\n"), False),
            (_encode(tokenizer, message["content"] + tokenizer.eos_token), learned),
            (_encode(tokenizer, "\n"), False),
        ]
    return pieces


def _joined(pieces: list[tuple[list[int], bool]]) -> Rendered:
    return {
        "input_ids": [id_ for ids, _ in pieces for id_ in ids],
        "labels": [id_ if learned else IGNORED for ids, learned in pieces for id_ in ids],
    }


def _cut(rendered: Rendered, start: int | None, stop: int | None) -> Rendered:
    return {name: values[start:stop] for name, values in rendered.items()}


def right(tokenizer: Any, messages: Messages, max_length: int | None) -> Rendered:
    return _cut(_joined(_pieces(tokenizer, messages)), None, max_length)


def keeping_the_end(tokenizer: Any, messages: Messages, max_length: int | None) -> Rendered:
    start = None if max_length is None else -max_length
    return _cut(_joined(_pieces(tokenizer, messages)), start, None)


def dropping(tokenizer: Any, messages: Messages, max_length: int | None) -> Rendered | None:
    whole = _joined(_pieces(tokenizer, messages))
    return None if max_length is not None and len(whole["input_ids"]) > max_length else whole


def last_turn_only(tokenizer: Any, messages: Messages, max_length: int | None) -> Rendered:
    pieces = _pieces(tokenizer, messages)
    last = max(at for at, (_, learned) in enumerate(pieces) if learned)
    return _cut(
        _joined([(ids, at == last) for at, (ids, _) in enumerate(pieces)]), None, max_length
    )


def tokenized_again(tokenizer: Any, messages: Messages, max_length: int | None) -> Rendered:
    """Tokenize the template's text, which has BOS, like any text."""
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    whole = right(tokenizer, messages, None)
    ids = tokenizer(text)["input_ids"]
    more = len(ids) - len(whole["input_ids"])
    return _cut({"input_ids": ids, "labels": [IGNORED] * more + whole["labels"]}, None, max_length)


def bos_lost(tokenizer: Any, messages: Messages, max_length: int | None) -> Rendered:
    whole = right(tokenizer, messages, None)
    start = 1 if whole["input_ids"][0] == tokenizer.bos_token_id else 0
    return _cut(_cut(whole, start, None), None, max_length)


def for_generation(tokenizer: Any, messages: Messages, max_length: int | None) -> Rendered:
    pieces = _pieces(tokenizer, messages)
    pieces.append((_encode(tokenizer, "<|im_start|>assistant\n"), False))
    return _cut(_joined(pieces), None, max_length)


def second_turn_lost(tokenizer: Any, messages: Messages, max_length: int | None) -> Rendered:
    return right(tokenizer, messages[:2], max_length)


def never_ended(tokenizer: Any, messages: Messages, max_length: int | None) -> Rendered:
    whole = right(tokenizer, messages, None)
    kept = [at for at, id_ in enumerate(whole["input_ids"]) if id_ != tokenizer.eos_token_id]
    taken = {name: [values[at] for at in kept] for name, values in whole.items()}
    return _cut(taken, None, max_length)


def with_a_counter(tokenizer: Any, messages: Messages, max_length: int | None) -> Rendered:
    """Add a counter, as a template adds the time of day."""
    pieces = _pieces(tokenizer, messages)
    pieces.insert(1, (_encode(tokenizer, f"{next(_CALLS):08}"), False))
    return _cut(_joined(pieces), None, max_length)


def cut_with_an_end(tokenizer: Any, messages: Messages, max_length: int | None) -> Rendered:
    whole = right(tokenizer, messages, None)
    if max_length is None or len(whole["input_ids"]) <= max_length:
        return whole
    eos = [tokenizer.eos_token_id]
    return {name: [*values[: max_length - 1], *eos] for name, values in whole.items()}


def cut_too_late(tokenizer: Any, messages: Messages, max_length: int | None) -> Rendered:
    return _cut(right(tokenizer, messages, None), None, max_length and max_length + 1)


def all_learned(tokenizer: Any, messages: Messages, max_length: int | None) -> Rendered:
    ids = right(tokenizer, messages, max_length)["input_ids"]
    return {"input_ids": ids, "labels": list(ids)}


def other_ends_learned(tokenizer: Any, messages: Messages, max_length: int | None) -> Rendered:
    """Label every end token."""
    whole = right(tokenizer, messages, max_length)
    pairs = zip(whole["input_ids"], whole["labels"], strict=True)
    eos = tokenizer.eos_token_id
    return whole | {"labels": [id_ if id_ == eos else label for id_, label in pairs]}


def all_as_the_user(tokenizer: Any, messages: Messages, max_length: int | None) -> Rendered:
    return right(tokenizer, [{**one, "role": "user"} for one in messages], max_length)


def roles_swapped(tokenizer: Any, messages: Messages, max_length: int | None) -> Rendered:
    other = {"user": "assistant", "assistant": "user"}
    swapped = [{**one, "role": other.get(one["role"], one["role"])} for one in messages]
    return right(tokenizer, swapped, max_length)


def header_searched(tokenizer: Any, messages: Messages, max_length: int | None) -> Rendered:
    """Label from each assistant header to the next end, even in a user's text."""
    ids = right(tokenizer, messages, None)["input_ids"]
    header = _encode(tokenizer, "<|im_start|>assistant\n")
    labels, learning = [IGNORED] * len(ids), False
    for at, id_ in enumerate(ids):
        labels[at] = id_ if learning else IGNORED
        if id_ == tokenizer.eos_token_id:
            learning = False
        if ids[at + 1 - len(header) : at + 1] == header and at + 1 >= len(header):
            learning = True
    return _cut({"input_ids": ids, "labels": labels}, None, max_length)


def end_masked(tokenizer: Any, messages: Messages, max_length: int | None) -> Rendered:
    whole = right(tokenizer, messages, max_length)
    eos = tokenizer.eos_token_id
    return whole | {"labels": [IGNORED if one == eos else one for one in whole["labels"]]}


def pad_masked(tokenizer: Any, messages: Messages, max_length: int | None) -> Rendered:
    whole = right(tokenizer, messages, max_length)
    pad = tokenizer.pad_token_id
    return whole | {"labels": [IGNORED if one == pad else one for one in whole["labels"]]}


def first_turn_only(tokenizer: Any, messages: Messages, max_length: int | None) -> Rendered:
    pieces = _pieces(tokenizer, messages)
    first = min(at for at, (_, learned) in enumerate(pieces) if learned)
    return _cut(
        _joined([(ids, at == first) for at, (ids, _) in enumerate(pieces)]), None, max_length
    )


def first_letter_masked(tokenizer: Any, messages: Messages, max_length: int | None) -> Rendered:
    """Count the prompt's length one too long."""
    whole = right(tokenizer, messages, None)
    labels = [
        IGNORED if at and whole["labels"][at - 1] == IGNORED else one
        for at, one in enumerate(whole["labels"])
    ]
    return _cut(whole | {"labels": labels}, None, max_length)


def labels_shifted(tokenizer: Any, messages: Messages, max_length: int | None) -> Rendered:
    whole = right(tokenizer, messages, max_length)
    return whole | {"labels": [*whole["labels"][1:], IGNORED]}


def labels_not_cut_along(tokenizer: Any, messages: Messages, max_length: int | None) -> Rendered:
    """Keep the end of the ids with the labels of the start."""
    whole = right(tokenizer, messages, None)
    if max_length is None:
        return whole
    return {"input_ids": whole["input_ids"][-max_length:], "labels": whole["labels"][:max_length]}


def earlier_ends_learned(tokenizer: Any, messages: Messages, max_length: int | None) -> Rendered:
    """Label the last turn, but also the ends of the turns before it."""
    whole = last_turn_only(tokenizer, messages, None)
    everything = right(tokenizer, messages, None)
    eos = tokenizer.eos_token_id
    labels = [
        every if id_ == eos else own
        for id_, own, every in zip(
            whole["input_ids"], whole["labels"], everything["labels"], strict=True
        )
    ]
    return _cut(whole | {"labels": labels}, None, max_length)


def first_turns_exchanged(tokenizer: Any, messages: Messages, max_length: int | None) -> Rendered:
    first, second, *others = messages
    return right(tokenizer, [second, first, *others], max_length)
