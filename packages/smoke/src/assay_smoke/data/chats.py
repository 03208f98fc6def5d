"""Checks code that converts messages to ids and labels."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

from assay_smoke.data.protocols import IGNORED, Message, Render, Tokenizer, Truncation
from assay_smoke.data.tokens import (
    LONG,
    SHORT,
    WITH_SYSTEM,
    Conversation,
    conversations,
    generation_prompt,
    show_row,
    show_token,
    show_tokens,
    template_ids,
)
from assay_smoke.data.verdict import Fault, RaisedError, Subject, SubjectReport

# The chats to render with a tokenizer.
Chats = Callable[[Tokenizer], Iterable[Conversation]]

# Ids and labels.
Rendered = tuple[tuple[int, ...], tuple[int, ...]]

_WANTED = "a mapping with input_ids and labels, lists of integers of equal length"


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn in the text."""

    message: Message
    tokens: tuple[int, ...]
    """Positions of the tokens that lie wholly in its content."""
    end: int | None
    """Position of the first special token between its content and the next turn's."""

    @property
    def is_assistant(self) -> bool:
        """Return True for a turn of the assistant."""
        return self.message["role"] == "assistant"


@dataclass(frozen=True, slots=True)
class Chat:
    """A rendered chat."""

    tokenizer: Tokenizer
    conversation: Conversation
    ids: tuple[int, ...]
    labels: tuple[int, ...]
    turns: tuple[Turn, ...]
    """The turns that were found in the text, in order."""

    @property
    def case(self) -> str:
        """Describe the chat."""
        return f"a chat with {len(self.conversation.messages)} turns: {self.conversation.name}"

    def fault_at(self, name: str, position: int, reason: str) -> Fault:
        """Return the fault `reason` of the property `name`, shown with the tokens around `position`."""
        shown = show_tokens(self.tokenizer, self.ids, self.labels, position)
        return Fault(name, reason, (self.case, *shown))


@dataclass(frozen=True, slots=True)
class Cut:
    """A chat cut to at most `most` tokens."""

    tokenizer: Tokenizer
    whole: Rendered
    most: int
    rendered: Rendered | None
    """None if the chat was dropped."""

    @property
    def case(self) -> str:
        """Describe the chat."""
        side = self.tokenizer.truncation_side
        whole = len(self.whole[0])
        return f"a chat of {whole} tokens, at most {self.most} wanted, truncation_side {side}"

    @property
    def start(self) -> int | None:
        """Return where the remaining tokens begin in the whole chat, or None if they are neither of its ends."""
        if self.rendered is None:
            return None
        ids, whole = self.rendered[0], self.whole[0]
        starts = (0, len(whole) - len(ids))
        return next((at for at in starts if ids == whole[at : at + len(ids)]), None)


@dataclass(frozen=True, slots=True)
class Renderer:
    """The function under check with a tokenizer."""

    subject: Subject
    function: Render
    tokenizer: Tokenizer

    def render(self, conversation: Conversation, max_length: int | None = None) -> Rendered | None:
        """Render a chat to ids and labels, or None if it is dropped. Raises: RaisedError."""
        limit = "" if max_length is None else f", at most {max_length} tokens"
        with self.subject.called_for(f"the chat {list(conversation.messages)}{limit}"):
            messages = [message.copy() for message in conversation.messages]
            rendered = self.function(self.tokenizer, messages, max_length)
            if rendered is None:
                return None
            ids, labels = (tuple(map(int, rendered[key])) for key in ("input_ids", "labels"))
        if len(ids) != len(labels):
            raise self.subject.returned(f"{len(ids)} ids and {len(labels)} labels", _WANTED)
        return None if not ids and max_length is not None else (ids, labels)

    def chats(self, report: SubjectReport, chats: Chats) -> Iterator[Chat]:
        """Render all chats. A template may refuse a system's turn, which is noted."""
        for conversation in chats(self.tokenizer):
            try:
                rendered = self.render(conversation)
            except RaisedError as error:
                if conversation is not WITH_SYSTEM:
                    raise
                report.note(f"refuses a system's turn: {str(error).splitlines()[0]}")
                continue
            if rendered is None:
                raise self.subject.returned("None for a chat without a length limit", _WANTED)
            turns = tuple(_find_turns(self.tokenizer, rendered[0], conversation.messages))
            yield Chat(self.tokenizer, conversation, *rendered, turns)

    def cuts(self) -> Iterator[Cut]:
        """Yield one chat cut to several lengths, the longest first."""
        whole = self.render(LONG)
        if whole is None:
            return
        size = len(whole[0])
        for most in sorted({size - 1, 3 * size // 4, size // 2, size // 4, 2}, reverse=True):
            cut = Cut(self.tokenizer, whole, most, self.render(LONG, most))
            if self.render(LONG) == whole:  # otherwise the texts differ by more than the cut
                yield cut


def _find_turns(
    tokenizer: Tokenizer, ids: Sequence[int], messages: Sequence[Message]
) -> Iterator[Turn]:
    """Yield the turns in the text, up to the first that is missing after its predecessor."""
    # May hold special tokens that are declared nowhere else.
    added = tokenizer.added_tokens_decoder
    special = {*tokenizer.all_special_ids, *(id_ for id_, one in added.items() if one.special)}
    texts = [_decode(tokenizer, ids[: number + 1]) for number in range(len(ids))]
    text, ends = _decode(tokenizer, ids), [len(begun) for begun in texts]
    # Bytes of an unfinished character may decode to several characters.
    for number in range(len(ends) - 2, -1, -1):
        ends[number] = min(ends[number], ends[number + 1])
    begins = [0, *ends[:-1]]
    spans, stop = [], 0
    for message in messages:
        begin = text.find(message["content"], stop)
        if begin < 0:
            break
        stop = begin + len(message["content"])
        spans.append((begin, stop))
    following = [*(begin for begin, _ in spans[1:]), len(text)]
    for message, (begin, stop), limit in zip(messages, spans, following, strict=False):
        # A token that only completes the bytes of a character belongs to the previous character.
        tokens = tuple(
            at for at, end in enumerate(ends) if begin <= begins[at] and begin < end <= stop
        )
        behind = (at for at, end in enumerate(ends) if stop < end <= limit and ids[at] in special)
        yield Turn(message, tokens, next(behind, None))


def _decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    whole = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return str(tokenizer.decode(list(ids), **whole))


ONE_BOS = "a chat begins with one BOS, or with none where the template has none"
TURNS = "every turn is in the text, in order"
ROLES = "turns begin as those of their role"
ENDED = "an assistant's turn ends with a special token"
NO_PROMPT = "the text does not end with the prompt for generation"
REPEATABLE = "a chat rendered twice is the same"
CUT = "a chat that is too long is cut at one end, or dropped"

CHAT_PROPERTIES = (ONE_BOS, TURNS, ENDED, NO_PROMPT, REPEATABLE, ROLES, CUT)


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
    report = SubjectReport.promising(subject.name, CHAT_PROPERTIES)
    for tokenizer in tokenizers:
        renderer = Renderer(subject, render, tokenizer)
        whole = renderer.render(LONG)
        text = "" if whole is None else _decode(tokenizer, whole[0])
        headers = _find_headers(text)
        own_prompt = generation_prompt(tokenizer, SHORT.messages[:1]).strip()
        report.judge([ROLES], _find_swapped_roles(tokenizer, text, headers, own_prompt))
        prompt = headers.prompt or own_prompt
        for chat in renderer.chats(report, chats):
            faults = [*_find_faults(chat, prompt)]
            faults += _find_other_rendering(renderer, chat)
            report.judge(CHAT_PROPERTIES[:-2], faults)
            for note in _find_notes(chat, eos_token_ids):
                report.note(note)
        for cut in renderer.cuts():
            report.judge([CUT], _find_wrong_cut(cut, truncation))
            side = "" if truncation else " (--truncation does not declare it)"
            if cut.rendered is None:
                report.note(f"chats that are too long are dropped{side}")
            elif cut.start is not None:
                kept = "end" if cut.start else "start"
                report.note(f"chats that are too long keep their {kept}{side}")
    return report


class _Headers(NamedTuple):
    """The text before turns of LONG."""

    user: str
    """Without the end of the assistant's turn before."""
    assistant: str
    """With the end of the user's turn before."""
    prompt: str
    """The text that begins every assistant turn and is repeated after the last one; empty without such a text."""


def _find_headers(text: str) -> _Headers:
    """Find the headers in the rendered LONG.

    The end of a turn does not count as a prompt, because it also stands before a user turn.
    """
    *between, text = _split_at_turns(text)
    _, before_assistant, before_user, _ = between
    pairs = zip(text, before_user, strict=False)
    num_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    added, assistant = text[num_equal:].strip(), before_assistant.strip()
    prompt = added if assistant.endswith(added) else ""
    return _Headers(before_user[num_equal:].strip(), assistant, prompt)


def _split_at_turns(text: str) -> list[str]:
    """Split the rendered LONG at the content of its turns."""
    between = []
    for message in LONG.messages:
        before, _, text = text.partition(message["content"])
        between.append(before)
    return [*between, text]


def _find_swapped_roles(
    tokenizer: Tokenizer, text: str, headers: _Headers, own_prompt: str
) -> Iterator[Fault]:
    """Find turns of LONG under the header of the other role.

    text: the rendered chat; own_prompt: that of the tokenizer's template.
    """
    case = f"a chat with {len(LONG.messages)} turns: {LONG.name}"
    for role, begin, other in (
        ("assistant", headers.assistant, headers.user),
        ("user", headers.user, own_prompt),
    ):
        if other and begin.endswith(other):
            reason = f"a turn of the {role} begins with {other!r}, as those of the other role"
            yield Fault(ROLES, reason, (case,))
    other_role = {"user": "assistant", "assistant": "user"}
    swapped = [
        Message(role=other_role[one["role"]], content=one["content"]) for one in LONG.messages
    ]
    right = wrong = ""
    with suppress(Exception):  # templates may refuse a chat that the assistant begins
        right, wrong = (
            _decode(tokenizer, template_ids(tokenizer, one)) for one in (LONG.messages, swapped)
        )
    # The text before the first turn may hold the time.
    given, right_turns, wrong_turns = (_split_at_turns(one)[1:] for one in (text, right, wrong))
    if given == wrong_turns != right_turns:
        reason = "the text is that of the chat template for a chat with the roles swapped"
        yield Fault(ROLES, reason, (case, f"the text: {text!r}"))


def _find_faults(chat: Chat, prompt: str) -> Iterator[Fault]:
    tokenizer, wanted = chat.tokenizer, chat.conversation.messages
    if (bos := tokenizer.bos_token_id) is not None:
        count = _leading(chat.ids, bos)
        shown = (chat.case, f"begins with: {show_row(tokenizer, chat.ids[:4])}")
        if count > 1:
            written = (
                "as if the template wrote one and the tokenizer added another (add_special_tokens)"
            )
            begin = f"the text begins with {count} tokens {show_token(tokenizer, bos)}"
            yield Fault(ONE_BOS, f"{begin}, {written}", shown)
        elif not count and _leading(template_ids(tokenizer, wanted), bos):
            reason = "the template writes BOS, and the rendered chat has none"
            yield Fault(ONE_BOS, reason, shown)
    text = str(tokenizer.decode(list(chat.ids)))
    if (found := len(chat.turns)) < len(wanted):
        turn = f"turn {found}, {wanted[found]['content']!r} of the {wanted[found]['role']}"
        where = "is not in the text"
        if wanted[found]["content"] in text:
            where = "comes before an earlier turn"
        yield Fault(TURNS, f"{turn}, {where}", (chat.case, f"the text: {text!r}"))
    last = len(chat.ids) - 1
    if any(turn.is_assistant and turn.end is None for turn in chat.turns[-1:]):
        never = "a model trained on it never learns to stop"
        yield chat.fault_at(ENDED, last, f"no special token follows the last turn: {never}")
    if prompt and text.strip().endswith(prompt):
        reason = (
            f"the text of a training chat ends with {prompt!r}, which begins an assistant's turn: render it"
            " with add_generation_prompt=False, and let the template obey that"
        )
        yield chat.fault_at(NO_PROMPT, last, reason)


def _find_other_rendering(renderer: Renderer, chat: Chat) -> Iterator[Fault]:
    again = renderer.render(chat.conversation)
    if again == (chat.ids, chat.labels):
        return
    ids = () if again is None else again[0]
    what = "labels" if ids == chat.ids else "ids"
    texts = {"first": chat.ids, "second": ids}
    shown = [f"{call}: {_decode(chat.tokenizer, one)!r}" for call, one in texts.items()]
    yield Fault(REPEATABLE, f"the second call returns different {what}", (chat.case, *shown))


def _leading(ids: Sequence[int], token: int) -> int:
    return next((count for count, id_ in enumerate(ids) if id_ != token), len(ids))


def _find_notes(chat: Chat, eos_token_ids: Sequence[int]) -> Iterator[str]:
    """Find remarkable behavior, such as that of templates which breaks code that relies on stable prefixes."""
    tokenizer, messages = chat.tokenizer, chat.conversation.messages
    for turn in chat.turns[-1:]:
        if turn.is_assistant and turn.end is not None:
            end = chat.ids[turn.end]
            if eos_token_ids and end not in eos_token_ids:
                stops = ", ".join(show_token(tokenizer, id_) for id_ in eos_token_ids)
                yield f"a turn ends with {show_token(tokenizer, end)}, but generation stops at {stops}"
    own = template_ids(tokenizer, messages)
    if own and chat.ids != own:
        yield "the text differs from that of the tokenizer's chat template"
    begin = template_ids(tokenizer, messages[:2]) if own and len(chat.turns) >= 4 else ()
    if own[: len(begin)] != begin:
        changes = "the template changes an earlier turn when another follows"
        yield f"{changes}: masks computed from lengths of shorter chats are wrong"


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


OWN_ID = "a label is the id at its own position"
OTHERS = "no token of a user's or system's turn has a label"
ASSISTANT = "the tokens of an assistant's turn have labels"
END = "the end of an assistant's turn has a label if its text has"
PADDING = "labels do not depend on the pad token"
CUT_LABELS = "a cut chat keeps its remaining labels"

LABEL_PROPERTIES = (OWN_ID, OTHERS, ASSISTANT, END, PADDING, CUT_LABELS)


def check_labels(
    subject: Subject, render: Render, tokenizers: Sequence[Tokenizer], chats: Chats = conversations
) -> SubjectReport:
    """Render all chats with all tokenizers and judge the labels."""
    report = SubjectReport.promising(subject.name, LABEL_PROPERTIES)
    for tokenizer in tokenizers:
        renderer = Renderer(subject, render, tokenizer)
        for chat in renderer.chats(report, chats):
            report.judge((OWN_ID, OTHERS, ASSISTANT, END), _find_wrong_labels(report, chat))
            report.judge([PADDING], _find_padding_effect(renderer, chat))
        for cut in renderer.cuts():
            report.judge([CUT_LABELS], _find_lost_labels(report, cut))
    return report


def _find_wrong_labels(report: SubjectReport, chat: Chat) -> Iterator[Fault]:
    """Compare the labels with an oracle's. The assistant's turns may all have labels, or the last alone."""
    right = _right_labels(report, chat)
    seen = set()
    for at, (id_, label) in enumerate(zip(chat.ids, chat.labels, strict=True)):
        name, expected, turn = right.get(at, (OWN_ID, label, None))
        if label not in (IGNORED, id_):
            reason = f"the label of {show_token(chat.tokenizer, id_)} is another id"
            if chat.ids[at + 1 : at + 2] == (label,):
                reason += ": labels are shifted, and models shift them again"
            yield chat.fault_at(OWN_ID, at, reason)
        is_other = (label == IGNORED) != (expected == IGNORED)
        if is_other and turn is not None and (name, turn.tokens) not in seen:
            seen.add((name, turn.tokens))
            yield chat.fault_at(name, at, _describe_label(chat, turn, at))


def _right_labels(report: SubjectReport, chat: Chat) -> dict[int, tuple[str, int, Turn]]:
    """Return the property, label and turn of each position where only one label is right."""
    right: dict[int, tuple[str, int, Turn]] = {}
    last = next((turn for turn in chat.turns[::-1] if turn.is_assistant), None)
    for turn in chat.turns:
        has_labels = any(chat.labels[at] != IGNORED for at in turn.tokens)
        is_learned = turn.is_assistant and (has_labels or turn is last)
        for at in turn.tokens:
            name = ASSISTANT if turn.is_assistant else OTHERS
            right[at] = (name, chat.ids[at] if is_learned else IGNORED, turn)
        if last is None:
            continue
        if turn.is_assistant and not is_learned:
            report.note("only the assistant's last turn has labels")
        # The last turn shows which token is the end; `check_chat` judges whether there is one.
        end, shown = turn.end, last.end
        is_judged = has_labels or turn is not last
        if is_judged and end is not None and shown is not None and chat.ids[end] == chat.ids[shown]:
            name = END if turn.is_assistant else OTHERS
            right[end] = (name, chat.ids[end] if is_learned else IGNORED, turn)
    return right


def _describe_label(chat: Chat, turn: Turn, at: int) -> str:
    """Describe the wrong label at a position of a turn."""
    content, token = repr(turn.message["content"]), show_token(chat.tokenizer, chat.ids[at])
    num_learned = sum(chat.labels[at] != IGNORED for at in turn.tokens)
    if at == turn.end and not turn.is_assistant:
        return f"the end of the {turn.message['role']}'s turn {content}, {token}, has a label"
    if not turn.is_assistant:
        return f"{num_learned} tokens of the {turn.message['role']}'s turn {content} have labels"
    if at == turn.end and not num_learned:
        return f"the end of the turn {content}, {token}, has a label, and its text has none"
    if at == turn.end:
        lost = f"the end of an assistant's turn, {token}, has no label"
        return f"{lost}: a model never learns to stop"
    if not num_learned:
        return f"no token of the assistant's last turn {content} has a label"
    num_masked = len(turn.tokens) - num_learned
    return f"{num_masked} of {len(turn.tokens)} tokens of the turn {content} have no label"


def _find_padding_effect(renderer: Renderer, chat: Chat) -> Iterator[Fault]:
    """Find labels that change when the tokenizer pads with EOS, as many models' do."""
    tokenizer = copy.deepcopy(chat.tokenizer)
    if tokenizer.eos_token is None:
        return
    tokenizer.pad_token = tokenizer.eos_token
    again = replace(renderer, tokenizer=tokenizer).render(chat.conversation)
    if again is None or again == (chat.ids, chat.labels):
        return
    if renderer.render(chat.conversation) != (chat.ids, chat.labels):
        return  # the pad token is not what changes it
    ids, labels = again
    if ids != chat.ids:
        reason = "with pad_token = eos_token the ids or labels of a chat change"
        yield Fault(PADDING, reason, (chat.case,))
        return
    changed = replace(chat, labels=labels)
    at = next(at for at in range(len(ids)) if labels[at] != chat.labels[at])
    how = "is lost" if labels[at] == IGNORED else "changes"
    reason = f"with pad_token = eos_token the label of {show_token(tokenizer, ids[at])} {how}"
    yield changed.fault_at(PADDING, at, reason)


def _find_lost_labels(report: SubjectReport, cut: Cut) -> Iterator[Fault]:
    """Find remaining tokens with other labels than in the whole chat."""
    if cut.rendered is None or cut.start is None:
        return  # dropped, or judged as wrong text already
    ids, actual = cut.rendered
    expected = cut.whole[1][cut.start : cut.start + len(ids)]
    if actual == expected:
        if set(actual) == {IGNORED}:
            report.note("a cut chat may have no labels, so that its loss is 0/0")
        return
    at = next(at for at in range(len(ids)) if actual[at] != expected[at])
    moved = sum(label not in (IGNORED, id_) for id_, label in zip(ids, actual, strict=True))
    lost = sum(one == IGNORED != other for one, other in zip(actual, expected, strict=True))
    total = sum(label != IGNORED for label in expected)
    reason = f"{lost} of {total} labels of the remaining tokens are lost"
    if moved:
        reason = f"{moved} labels of the remaining tokens are ids of other tokens"
    elif not lost:
        reason = "tokens without a label in the whole chat have one in the cut chat"
    yield Fault(CUT_LABELS, reason, (cut.case, *show_tokens(cut.tokenizer, ids, actual, at)))
