"""Checks labels of chats: the assistant's turns and their ends have labels, and nothing else."""

import copy
from collections.abc import Iterator, Sequence

from assay_smoke.data.properties import (
    PropertyLog,
    Subject,
    SubjectReport,
    Violation,
    first_violation,
)
from assay_smoke.data.protocols import IGNORED, Render, Tokenizer
from assay_smoke.data.text.rendering import (
    Chat,
    Chats,
    Turn,
    labelled,
    render_all,
    render_chat,
    turn_end,
)
from assay_smoke.data.text.truncation import cut_chats, judge_cut_labels
from assay_smoke.data.tokens import conversations, show_token

OWN_ID = "a label is the id at its own position"
OTHERS = "no token of a user's or system's turn has a label"
ASSISTANT = "the tokens of an assistant's turn have labels"
END = "the end of an assistant's turn has a label"
PADDING = "labels do not depend on the pad token"
CUT = "a cut chat keeps its remaining labels"

PROPERTIES = (OWN_ID, OTHERS, ASSISTANT, END, PADDING, CUT)


def check_labels(
    subject: Subject,
    render: Render,
    tokenizers: Sequence[Tokenizer],
    chats: Chats = conversations,
) -> SubjectReport:
    """Render all chats with all tokenizers and judge the labels."""
    log = PropertyLog(subject.name, PROPERTIES)
    for tokenizer in tokenizers:
        for chat in render_all(log, subject, render, tokenizer, chats):
            log.judge(OWN_ID, _find_other_id(chat))
            log.judge(OTHERS, first_violation(_find_learned(chat, turn) for turn in chat.turns))
            log.judge(ASSISTANT, _find_unlearned(log, chat))
            log.judge(END, first_violation(_find_masked_end(chat, turn) for turn in _learned(chat)))
            log.judge(PADDING, _find_padding_effect(subject, render, chat))
        for cut in cut_chats(subject, render, tokenizer):
            judge_cut_labels(log, CUT, cut)
    return log.report()


def _find_other_id(chat: Chat) -> Violation | None:
    for at in labelled(chat):
        if chat.labels[at] != chat.ids[at]:
            reason = f"the label of {show_token(chat.tokenizer, chat.ids[at])} is another id"
            if chat.labels[at : at + 1] == chat.ids[at + 1 : at + 2]:
                reason += ": labels are shifted, and models shift them again"
            return chat.violation_at(at, reason)
    return None


def _find_learned(chat: Chat, turn: Turn) -> Violation | None:
    role = turn.message["role"]
    if role == "assistant":
        return None
    learned = [at for at in turn.tokens if chat.labels[at] != IGNORED]
    if not learned:
        return None
    reason = f"{len(learned)} tokens of the {role}'s turn {turn.message['content']!r} have labels"
    return chat.violation_at(learned[0], reason)


def _assistants(chat: Chat) -> list[Turn]:
    return [turn for turn in chat.turns if turn.message["role"] == "assistant"]


def _learned(chat: Chat) -> Iterator[Turn]:
    """Yield the assistant's turns with labels."""
    for turn in _assistants(chat):
        if any(chat.labels[at] != IGNORED for at in turn.tokens):
            yield turn


def _find_unlearned(log: PropertyLog, chat: Chat) -> Violation | None:
    """Find a turn with only some labels, or a last turn without any. Earlier turns may have none."""
    turns = _assistants(chat)
    for turn in turns:
        masked = [at for at in turn.tokens if chat.labels[at] == IGNORED]
        if not masked:
            continue
        content = turn.message["content"]
        if len(masked) < len(turn.tokens):
            reason = (
                f"{len(masked)} of {len(turn.tokens)} tokens of the turn {content!r} have no label"
            )
            return chat.violation_at(masked[0], reason)
        if turn is turns[-1]:
            reason = f"no token of the assistant's last turn {content!r} has a label"
            return chat.violation_at(masked[0], reason)
        log.note("only the assistant's last turn has labels")
    return None


def _find_masked_end(chat: Chat, turn: Turn) -> Violation | None:
    """Find a turn whose end has no label. The last turn shows which token is the end."""
    last, own = turn_end(chat, _assistants(chat)[-1]), turn_end(chat, turn)
    if last is None or own is None or chat.ids[own] != chat.ids[last]:
        return None  # `check_chat` judges whether turns have an end
    if chat.labels[own] != IGNORED:
        return None
    token = show_token(chat.tokenizer, chat.ids[own])
    reason = f"the end of an assistant's turn, {token}, has no label: a model never learns to stop"
    return chat.violation_at(own, reason)


def _find_padding_effect(subject: Subject, render: Render, chat: Chat) -> Violation | None:
    """Find labels that change when the tokenizer pads with EOS, as many models' do."""
    tokenizer = copy.deepcopy(chat.tokenizer)
    if tokenizer.eos_token is None:
        return None
    tokenizer.pad_token = tokenizer.eos_token
    again = render_chat(subject, render, tokenizer, chat.conversation, None)
    if again is None or again == (chat.ids, chat.labels):
        return None
    ids, labels = again
    reason = "with pad_token = eos_token the ids or labels of a chat change"
    if ids == chat.ids:
        at = next(at for at in range(len(ids)) if labels[at] != chat.labels[at])
        reason = f"with pad_token = eos_token the label of {show_token(tokenizer, ids[at])} is lost"
        return Chat(tokenizer, chat.conversation, ids, labels, chat.turns).violation_at(at, reason)
    return Violation(reason, (chat.case,))
