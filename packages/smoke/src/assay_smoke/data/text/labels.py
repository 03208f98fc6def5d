"""Checks labels of chats: the assistant's turns and their ends have labels, and nothing else."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace

from assay_smoke.data.properties import Fault, PropertyLog, Subject, SubjectReport
from assay_smoke.data.protocols import IGNORED, Render, Tokenizer
from assay_smoke.data.text.rendering import Chat, Chats, Cut, Renderer, Turn
from assay_smoke.data.tokens import conversations, show_token, show_tokens

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
        renderer = Renderer(subject, render, tokenizer)
        for chat in renderer.chats(log, chats):
            log.judge([OWN_ID], _find_other_ids(chat))
            log.judge((OTHERS, ASSISTANT, END), _find_wrong_turns(log, chat))
            log.judge([PADDING], _find_padding_effect(renderer, chat))
        for cut in renderer.cuts():
            log.judge([CUT], _find_wrong_cut(log, cut))
    return log.report()


def _find_other_ids(chat: Chat) -> Iterator[Fault]:
    for at, (id_, label) in enumerate(zip(chat.ids, chat.labels, strict=True)):
        if label not in (IGNORED, id_):
            reason = f"the label of {show_token(chat.tokenizer, id_)} is another id"
            if chat.ids[at + 1 : at + 2] == (label,):
                reason += ": labels are shifted, and models shift them again"
            yield chat.fault_at(OWN_ID, at, reason)


def _find_wrong_turns(log: PropertyLog, chat: Chat) -> Iterator[Fault]:
    """Find turns with wrong labels. The assistant's turns may all have labels, or the last alone."""
    last = [turn for turn in chat.turns if turn.message["role"] == "assistant"][-1:]
    for turn in chat.turns:
        learned = [at for at in turn.tokens if chat.labels[at] != IGNORED]
        masked = [at for at in turn.tokens if chat.labels[at] == IGNORED]
        content = repr(turn.message["content"])
        if (role := turn.message["role"]) != "assistant":
            reason = f"{len(learned)} tokens of the {role}'s turn {content} have labels"
            yield from (chat.fault_at(OTHERS, at, reason) for at in learned[:1])
        elif learned:
            reason = (
                f"{len(masked)} of {len(turn.tokens)} tokens of the turn {content} have no label"
            )
            yield from (chat.fault_at(ASSISTANT, at, reason) for at in masked[:1])
            yield from _find_masked_end(chat, turn, *last)
        elif turn in last:
            reason = f"no token of the assistant's last turn {content} has a label"
            yield from (chat.fault_at(ASSISTANT, at, reason) for at in masked[:1])
        elif masked:
            log.note("only the assistant's last turn has labels")


def _find_masked_end(chat: Chat, turn: Turn, last: Turn) -> Iterator[Fault]:
    """Find a turn whose end has no label. The last turn shows which token is the end."""
    if turn.end is None or last.end is None or chat.ids[turn.end] != chat.ids[last.end]:
        return  # `check_chat` judges whether turns have an end
    token = show_token(chat.tokenizer, chat.ids[turn.end])
    reason = f"the end of an assistant's turn, {token}, has no label: a model never learns to stop"
    if chat.labels[turn.end] == IGNORED:
        yield chat.fault_at(END, turn.end, reason)


def _find_padding_effect(renderer: Renderer, chat: Chat) -> Iterator[Fault]:
    """Find labels that change when the tokenizer pads with EOS, as many models' do."""
    tokenizer = copy.deepcopy(chat.tokenizer)
    if tokenizer.eos_token is None:
        return
    tokenizer.pad_token = tokenizer.eos_token
    again = replace(renderer, tokenizer=tokenizer).render(chat.conversation)
    if again is None or again == (chat.ids, chat.labels):
        return
    ids, labels = again
    if ids != chat.ids:
        reason = "with pad_token = eos_token the ids or labels of a chat change"
        yield Fault(PADDING, reason, (chat.case,))
        return
    changed = replace(chat, labels=labels)
    at = next(at for at in range(len(ids)) if labels[at] != chat.labels[at])
    reason = f"with pad_token = eos_token the label of {show_token(tokenizer, ids[at])} is lost"
    yield changed.fault_at(PADDING, at, reason)


def _find_wrong_cut(log: PropertyLog, cut: Cut) -> Iterator[Fault]:
    """Find remaining tokens with other labels than in the whole chat."""
    if cut.rendered is None or cut.start is None:
        return  # dropped, or judged as wrong text already
    ids, actual = cut.rendered
    expected = cut.whole[1][cut.start : cut.start + len(ids)]
    if actual == expected:
        if set(actual) == {IGNORED}:
            log.note("a cut chat may have no labels, so that its loss is 0/0")
        return
    at = next(at for at in range(len(ids)) if actual[at] != expected[at])
    lost = sum(one == IGNORED != other for one, other in zip(actual, expected, strict=True))
    total = sum(label != IGNORED for label in expected)
    reason = f"{lost} of {total} labels of the remaining tokens are lost"
    if not lost:
        reason = "tokens without a label in the whole chat have one in the cut chat"
    yield Fault(CUT, reason, (cut.case, *show_tokens(cut.tokenizer, ids, actual, at)))
