"""Renders chats by a function and assigns their tokens to turns."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from assay_smoke.data.properties import PropertyLog, RaisedError, Subject, Violation
from assay_smoke.data.protocols import IGNORED, Message, Render, Tokenizer
from assay_smoke.data.tokens import WITH_SYSTEM, Conversation, show_tokens

# The chats to render with a tokenizer.
Chats = Callable[[Tokenizer], Iterable[Conversation]]

_WANTED = "a mapping with input_ids and labels, lists of integers of equal length"


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn in the text."""

    message: Message
    tokens: tuple[int, ...]
    """Positions of the tokens that lie wholly in its content."""
    stop: int
    """First position after its content."""


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

    def violation_at(self, position: int, reason: str) -> Violation:
        """Return the violation `reason`, shown with the tokens around `position`."""
        return Violation(
            reason, (self.case, *show_tokens(self.tokenizer, self.ids, self.labels, position))
        )


def render_all(
    log: PropertyLog,
    subject: Subject,
    render: Render,
    tokenizer: Tokenizer,
    chats: Chats,
) -> Iterator[Chat]:
    """Render all chats. A template may refuse a system's turn, which is noted."""
    for conversation in chats(tokenizer):
        try:
            rendered = render_chat(subject, render, tokenizer, conversation, None)
        except RaisedError as error:
            if conversation is not WITH_SYSTEM:
                raise
            log.note(f"refuses a system's turn: {str(error).splitlines()[0]}")
            continue
        if rendered is None:
            raise subject.returned("None for a chat without a length limit", _WANTED)
        ids, labels = rendered
        turns = tuple(_find_turns(tokenizer, ids, conversation.messages))
        yield Chat(tokenizer, conversation, ids, labels, turns)


def render_chat(
    subject: Subject,
    render: Render,
    tokenizer: Tokenizer,
    conversation: Conversation,
    max_length: int | None,
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Render a chat to ids and labels, or None if it is dropped. Raises: RaisedError."""
    limit = "" if max_length is None else f", at most {max_length} tokens"
    with subject.called_for(f"the chat {list(conversation.messages)}{limit}"):
        rendered = render(
            tokenizer, [message.copy() for message in conversation.messages], max_length
        )
        if rendered is None:
            return None
        ids, labels = (tuple(map(int, rendered[key])) for key in ("input_ids", "labels"))
    if len(ids) != len(labels):
        raise subject.returned(f"{len(ids)} ids and {len(labels)} labels", _WANTED)
    if not ids and max_length is not None:
        return None
    return ids, labels


def _find_turns(
    tokenizer: Tokenizer, ids: Sequence[int], messages: Sequence[Message]
) -> Iterator[Turn]:
    """Yield the turns in the text, up to the first that is missing after its predecessor."""
    ends = _letters_until(tokenizer, ids)
    text = _decode(tokenizer, ids)
    begins = [0, *ends[:-1]]
    searched = 0
    for message in messages:
        begin = text.find(message["content"], searched)
        if begin < 0:
            return
        stop = begin + len(message["content"])
        # A token that only completes the bytes of a character belongs to the previous character.
        tokens = tuple(
            at for at, end in enumerate(ends) if begin <= begins[at] and begin < end <= stop
        )
        behind = next((at for at, end in enumerate(ends) if end > stop), len(ids))
        yield Turn(message, tokens, behind)
        searched = stop


def _letters_until(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """Return, for each token, the number of characters of the text up to its end."""
    ends = [len(_decode(tokenizer, ids[: number + 1])) for number in range(len(ids))]
    # Bytes of an unfinished character may decode to several characters.
    for number in range(len(ends) - 2, -1, -1):
        ends[number] = min(ends[number], ends[number + 1])
    return ends


def _decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return str(
        tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )


def control_ids(tokenizer: Tokenizer) -> set[int]:
    """Return the ids of special tokens, including those declared only as added tokens."""
    added = tokenizer.added_tokens_decoder
    return set(tokenizer.all_special_ids) | {id_ for id_, token in added.items() if token.special}


def turn_end(chat: Chat, turn: Turn) -> int | None:
    """Return the position of the first special token after a turn's content."""
    special = control_ids(chat.tokenizer)
    return next((at for at in range(turn.stop, len(chat.ids)) if chat.ids[at] in special), None)


def labelled(chat: Chat) -> list[int]:
    """Return the positions with labels."""
    return [at for at, label in enumerate(chat.labels) if label != IGNORED]
