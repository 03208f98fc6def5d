"""Checks rendered chats: one BOS, every turn once with its end, and no prompt for generation."""

from collections.abc import Sequence

from assay_smoke.data.properties import PropertyLog, Subject, SubjectReport, Violation
from assay_smoke.data.protocols import Render, Tokenizer
from assay_smoke.data.text.rendering import (
    Chat,
    Chats,
    control_ids,
    render_all,
    render_chat,
    turn_end,
)
from assay_smoke.data.text.truncation import Truncation, cut_chats, judge_cut_text
from assay_smoke.data.tokens import (
    SHORT,
    conversations,
    generation_prompt,
    show_row,
    show_token,
    template_ids,
)

ONE_BOS = "a chat begins with one BOS, or with none where the template has none"
TURNS = "every turn is in the text, in order"
ENDED = "an assistant's turn ends with a special token"
NO_PROMPT = "the text does not end with the prompt for generation"
REPEATABLE = "a chat rendered twice is the same"
CUT = "a chat that is too long is cut at one end, or dropped"

PROPERTIES = (ONE_BOS, TURNS, ENDED, NO_PROMPT, REPEATABLE, CUT)


def check_chat(
    subject: Subject,
    render: Render,
    tokenizers: Sequence[Tokenizer],
    eos_token_ids: Sequence[int] = (),
    truncation: Truncation | None = None,
    chats: Chats = conversations,
) -> SubjectReport:
    """Render all chats with all tokenizers.

    eos_token_ids: ids that end generation; empty if unknown.
    truncation: declared treatment of chats that are too long.
    """
    log = PropertyLog(subject.name, PROPERTIES)
    for tokenizer in tokenizers:
        for chat in render_all(log, subject, render, tokenizer, chats):
            log.judge(ONE_BOS, _find_bos(chat))
            log.judge(TURNS, _find_lost_turn(chat))
            log.judge(ENDED, _find_endless(log, chat, eos_token_ids))
            log.judge(NO_PROMPT, _find_prompt(chat))
            again = render_chat(subject, render, tokenizer, chat.conversation, None)
            changed = Violation("the second call returns different ids or labels", (chat.case,))
            log.judge(REPEATABLE, None if again == (chat.ids, chat.labels) else changed)
            _note_control_tokens(log, chat)
            _note_template(log, chat)
        for cut in cut_chats(subject, render, tokenizer):
            judge_cut_text(log, CUT, cut, truncation)
    return log.report()


def _find_bos(chat: Chat) -> Violation | None:
    bos = chat.tokenizer.bos_token_id
    if bos is None:
        return None
    count = _leading(chat.ids, bos)
    shown = (chat.case, f"begins with: {show_row(chat.tokenizer, chat.ids[:4])}")
    if count > 1:
        return Violation(
            f"the text begins with {count} times {show_token(chat.tokenizer, bos)}: the template writes"
            " it, and the tokenizer adds it again (add_special_tokens)",
            shown,
        )
    if not count and _leading(_template_ids(chat), bos):
        return Violation("the template writes BOS, and the rendered chat has none", shown)
    return None


def _leading(ids: Sequence[int], token: int) -> int:
    return next((count for count, id_ in enumerate(ids) if id_ != token), len(ids))


def _template_ids(chat: Chat) -> tuple[int, ...]:
    return template_ids(chat.tokenizer, chat.conversation.messages)


def _find_lost_turn(chat: Chat) -> Violation | None:
    found, wanted = len(chat.turns), chat.conversation.messages
    if found == len(wanted):
        return None
    return Violation(
        f"turn {found}, {wanted[found]['content']!r} of the {wanted[found]['role']}, is not in the text",
        (chat.case, f"the text: {chat.tokenizer.decode(list(chat.ids))!r}"),
    )


def _find_endless(log: PropertyLog, chat: Chat, eos_token_ids: Sequence[int]) -> Violation | None:
    if not chat.turns or chat.turns[-1].message["role"] != "assistant":
        return None
    end = turn_end(chat, chat.turns[-1])
    if end is None:
        reason = (
            "no special token follows the last turn: a model trained on it never learns to stop"
        )
        return chat.violation_at(len(chat.ids) - 1, reason)
    if eos_token_ids and chat.ids[end] not in eos_token_ids:
        stops = ", ".join(show_token(chat.tokenizer, id_) for id_ in eos_token_ids)
        log.note(
            f"a turn ends with {show_token(chat.tokenizer, chat.ids[end])}, but generation stops at"
            f" {stops}"
        )
    return None


def _find_prompt(chat: Chat) -> Violation | None:
    prompt = generation_prompt(chat.tokenizer, SHORT.messages[:1]).strip()
    text = str(chat.tokenizer.decode(list(chat.ids))).strip()
    if not prompt or not text.endswith(prompt):
        return None
    reason = (
        "the text ends with the prompt for generation: render it with add_generation_prompt=False"
    )
    return chat.violation_at(len(chat.ids) - 1, reason)


def _note_control_tokens(log: PropertyLog, chat: Chat) -> None:
    special = control_ids(chat.tokenizer)
    for turn in chat.turns:
        inside = [at for at in turn.tokens if chat.ids[at] in special]
        if inside and turn.message["role"] == "user":
            token = show_token(chat.tokenizer, chat.ids[inside[0]])
            log.note(f"special tokens in a user's text become control tokens: {token}")


def _note_template(log: PropertyLog, chat: Chat) -> None:
    """Note template behavior that breaks code which relies on stable prefixes."""
    own = _template_ids(chat)
    if own and chat.ids != own:
        log.note("the text differs from that of the tokenizer's chat template")
    if not own or len(chat.turns) < 4:
        return
    begin = template_ids(chat.tokenizer, chat.conversation.messages[:2])
    if own[: len(begin)] != begin:
        log.note(
            "the template changes an earlier turn when another follows: masks computed from lengths of"
            " shorter chats are wrong"
        )
