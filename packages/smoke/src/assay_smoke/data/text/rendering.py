"""Renders chats by a function, whole or cut, and assigns their tokens to turns."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from assay_smoke.data.properties import Fault, PropertyLog, RaisedError, Subject
from assay_smoke.data.protocols import Message, Render, Tokenizer
from assay_smoke.data.tokens import LONG, WITH_SYSTEM, Conversation, show_tokens

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
    """Position of the first special token after its content."""


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

    def chats(self, log: PropertyLog, chats: Chats) -> Iterator[Chat]:
        """Render all chats. A template may refuse a system's turn, which is noted."""
        for conversation in chats(self.tokenizer):
            try:
                rendered = self.render(conversation)
            except RaisedError as error:
                if conversation is not WITH_SYSTEM:
                    raise
                log.note(f"refuses a system's turn: {str(error).splitlines()[0]}")
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
            yield Cut(self.tokenizer, whole, most, self.render(LONG, most))


def _find_turns(
    tokenizer: Tokenizer, ids: Sequence[int], messages: Sequence[Message]
) -> Iterator[Turn]:
    """Yield the turns in the text, up to the first that is missing after its predecessor."""
    special = control_ids(tokenizer)
    texts = [_decode(tokenizer, ids[: number + 1]) for number in range(len(ids))]
    text, ends = _decode(tokenizer, ids), [len(begun) for begun in texts]
    # Bytes of an unfinished character may decode to several characters.
    for number in range(len(ends) - 2, -1, -1):
        ends[number] = min(ends[number], ends[number + 1])
    begins = [0, *ends[:-1]]
    stop = 0
    for message in messages:
        begin = text.find(message["content"], stop)
        if begin < 0:
            return
        stop = begin + len(message["content"])
        # A token that only completes the bytes of a character belongs to the previous character.
        tokens = tuple(
            at for at, end in enumerate(ends) if begin <= begins[at] and begin < end <= stop
        )
        behind = (at for at, end in enumerate(ends) if end > stop and ids[at] in special)
        yield Turn(message, tokens, next(behind, None))


def _decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return str(
        tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )


def control_ids(tokenizer: Tokenizer) -> set[int]:
    """Return the ids of special tokens, including those declared only as added tokens."""
    added = tokenizer.added_tokens_decoder
    return set(tokenizer.all_special_ids) | {id_ for id_, token in added.items() if token.special}
