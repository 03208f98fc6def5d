"""Checks rendered chats: one BOS, every turn once with its end, and no prompt for generation."""

from collections.abc import Iterator, Sequence

from assay_smoke.data.properties import Fault, PropertyLog, Subject, SubjectReport
from assay_smoke.data.protocols import Render, Tokenizer, Truncation
from assay_smoke.data.text.rendering import Chat, Chats, Cut, Renderer, control_ids
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
        renderer = Renderer(subject, render, tokenizer)
        for chat in renderer.chats(log, chats):
            faults = [*_find_faults(chat)]
            if renderer.render(chat.conversation) != (chat.ids, chat.labels):
                reason = "the second call returns different ids or labels"
                faults.append(Fault(REPEATABLE, reason, (chat.case,)))
            log.judge(PROPERTIES[:-1], faults)
            for note in _find_notes(chat, eos_token_ids):
                log.note(note)
        for cut in renderer.cuts():
            log.judge([CUT], _find_wrong_cut(cut, truncation))
            if cut.rendered is None:
                log.note("chats that are too long are dropped")
            elif cut.start is not None:
                log.note(f"chats that are too long keep their {'end' if cut.start else 'start'}")
    return log.report()


def _find_faults(chat: Chat) -> Iterator[Fault]:
    tokenizer, wanted = chat.tokenizer, chat.conversation.messages
    if (bos := tokenizer.bos_token_id) is not None:
        count = _leading(chat.ids, bos)
        shown = (chat.case, f"begins with: {show_row(tokenizer, chat.ids[:4])}")
        if count > 1:
            reason = (
                f"the text begins with {count} times {show_token(tokenizer, bos)}: the template writes"
                " it, and the tokenizer adds it again (add_special_tokens)"
            )
            yield Fault(ONE_BOS, reason, shown)
        elif not count and _leading(template_ids(tokenizer, wanted), bos):
            reason = "the template writes BOS, and the rendered chat has none"
            yield Fault(ONE_BOS, reason, shown)
    text = str(tokenizer.decode(list(chat.ids)))
    if (found := len(chat.turns)) < len(wanted):
        turn = f"turn {found}, {wanted[found]['content']!r} of the {wanted[found]['role']}"
        yield Fault(TURNS, f"{turn}, is not in the text", (chat.case, f"the text: {text!r}"))
    last = len(chat.ids) - 1
    if chat.turns and chat.turns[-1].message["role"] == "assistant" and chat.turns[-1].end is None:
        reason = (
            "no special token follows the last turn: a model trained on it never learns to stop"
        )
        yield chat.fault_at(ENDED, last, reason)
    prompt = generation_prompt(tokenizer, SHORT.messages[:1]).strip()
    if prompt and text.strip().endswith(prompt):
        reason = "the text ends with the prompt for generation: render it with add_generation_prompt=False"
        yield chat.fault_at(NO_PROMPT, last, reason)


def _leading(ids: Sequence[int], token: int) -> int:
    return next((count for count, id_ in enumerate(ids) if id_ != token), len(ids))


def _find_notes(chat: Chat, eos_token_ids: Sequence[int]) -> Iterator[str]:
    """Find remarkable behavior, such as that of templates which breaks code that relies on stable prefixes."""
    tokenizer, messages = chat.tokenizer, chat.conversation.messages
    for turn in chat.turns[-1:]:
        if turn.message["role"] == "assistant" and turn.end is not None:
            end = chat.ids[turn.end]
            if eos_token_ids and end not in eos_token_ids:
                stops = ", ".join(show_token(tokenizer, id_) for id_ in eos_token_ids)
                yield f"a turn ends with {show_token(tokenizer, end)}, but generation stops at {stops}"
    special = control_ids(tokenizer)
    for turn in chat.turns:
        inside = [at for at in turn.tokens if chat.ids[at] in special]
        if inside and turn.message["role"] == "user":
            token = show_token(tokenizer, chat.ids[inside[0]])
            yield f"special tokens in a user's text become control tokens: {token}"
    own = template_ids(tokenizer, messages)
    if own and chat.ids != own:
        yield "the text differs from that of the tokenizer's chat template"
    begin = template_ids(tokenizer, messages[:2]) if own and len(chat.turns) >= 4 else ()
    if own[: len(begin)] != begin:
        yield (
            "the template changes an earlier turn when another follows: masks computed from lengths of"
            " shorter chats are wrong"
        )


def _find_wrong_cut(cut: Cut, declared: Truncation | None) -> Iterator[Fault]:
    """Find remaining tokens other than declared. Without a declaration, either end may remain."""
    if cut.rendered is None:
        if declared not in (None, "drop"):
            reason = f"a chat that is too long is dropped, but {declared} is declared"
            yield Fault(CUT, reason, (cut.case,))
        return
    ids = cut.rendered[0]
    begins, ends = (show_row(cut.tokenizer, part) for part in (ids[:4], ids[-4:]))
    kept = "keep-end" if cut.start else "keep-start"
    reason = ""
    if len(ids) > cut.most:
        reason = f"{len(ids)} tokens remain, at most {cut.most} are wanted"
    elif cut.start is None and ids[:-1] == cut.whole[0][: len(ids) - 1]:
        reason = "a cut chat gets an extra end token: a model learns to stop in the middle"
    elif cut.start is None:
        reason = "the remaining tokens are neither the start nor the end of the chat"
    elif declared not in (None, kept):
        reason = f"truncation is {kept}, but {declared} is declared"
    if reason:
        yield Fault(CUT, reason, (cut.case, f"begins with: {begins}", f"ends with: {ends}"))
