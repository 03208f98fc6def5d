"""Assigns tokens to turns in vocabularies with several tokens per character."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from assay_smoke.data.chats import ROLES, Renderer, check_chat
from assay_smoke.data.protocols import Message, RenderedChat
from assay_smoke.data.tokens import LONG, WITH_SYSTEM, Conversation, micro_tokenizer
from assay_smoke.data.verdict import RaisedError, Subject, SubjectReport


def byte_fallback_tokenizer() -> Any:
    """Make a tokenizer that encodes unknown characters as bytes, each decoded as a character."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {letter: 256 + number for number, letter in enumerate("abc")}
    backend = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")  # noqa: S106


def render(tokenizer: Any, messages: Any, _: int | None) -> RenderedChat:
    text = "".join(message["content"] + tokenizer.eos_token for message in messages)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("tokenizer", [micro_tokenizer(), byte_fallback_tokenizer()])
def test_all_bytes_of_a_letter_are_of_its_turn(tokenizer: Any) -> None:
    # In UTF-8 a has one byte, é two, 雪 three and the smile four.
    messages = (
        Message(role="user", content="雪🙂"),
        Message(role="assistant", content="aé"),
        Message(role="user", content="b雪"),
    )
    report = SubjectReport.promising("it", ())
    chats = [Conversation("letters", messages)]
    (chat,) = Renderer(Subject("it"), render, tokenizer).chats(report, lambda _: chats)
    assert len(chat.ids) == 7 + 1 + 3 + 1 + 4 + 1
    assert [turn.tokens for turn in chat.turns] == [
        tuple(range(7)),
        (8, 9, 10),
        (12, 13, 14, 15),
    ]
    assert [turn.end for turn in chat.turns] == [7, 11, 16]


def refuse_systems(tokenizer: Any, messages: Any, length: int | None) -> RenderedChat:
    if messages[0]["role"] == "system":
        raise ValueError("roles must alternate")
    return render(tokenizer, messages, length)


def test_a_template_may_refuse_the_turn_of_a_system() -> None:
    report = SubjectReport.promising("it", ())
    chats = [WITH_SYSTEM, Conversation("letters", (Message(role="user", content="a"),))]
    renderer = Renderer(Subject("it"), refuse_systems, micro_tokenizer())
    (chat,) = renderer.chats(report, lambda _: chats)
    assert chat.conversation is chats[1]
    (note,) = report.notes
    assert note == "refuses a system's turn: it raised ValueError: roles must alternate"


def test_a_template_may_refuse_no_other_turn() -> None:
    report = SubjectReport.promising("it", ())
    chats = [Conversation("another", WITH_SYSTEM.messages)]
    renderer = Renderer(Subject("it"), refuse_systems, micro_tokenizer())
    with pytest.raises(RaisedError, match="roles must alternate"):
        list(renderer.chats(report, lambda _: chats))


# The header of an assistant's turn has more than the prompt for generation; the end of a turn is its header.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{{ '<think></think>' }}{% endif %}"
    "{{ m['content'] + '<|eos|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INSTRUCTIONS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST]' + m['content'] + '[/INST]' }}"
    "{% else %}{{ m['content'] + '<|eos|>' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [THINKING, INSTRUCTIONS])
@pytest.mark.parametrize("is_swapped", [False, True])
def test_swapped_roles_are_found_by_the_template(template: str, *, is_swapped: bool) -> None:
    tokenizer = micro_tokenizer()
    tokenizer.chat_template = template
    other = {"user": "assistant", "assistant": "user"}

    def render_some(tokenizer: Any, messages: Any, most: int | None) -> RenderedChat:
        if is_swapped:
            messages = [one | {"role": other[one["role"]]} for one in messages]
        ids = tokenizer.apply_chat_template(messages)["input_ids"][:most]
        return {"input_ids": ids, "labels": ids}

    report = check_chat(Subject("it"), render_some, [tokenizer], chats=lambda _: [LONG])
    assert (ROLES in [finding.name for finding in report.findings]) is is_swapped
