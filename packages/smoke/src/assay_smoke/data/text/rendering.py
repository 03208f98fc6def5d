"""Chats as a function renders them, and which of their tokens are of which turn."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assay_smoke.data.properties import PropertyLog, Wrong
from assay_smoke.data.protocols import IGNORED, Message, Render
from assay_smoke.data.running_code import RaisedError, Subject
from assay_smoke.data.tokens.conversations import WITH_SYSTEM, Conversation
from assay_smoke.data.tokens.shown_tokens import show_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The chats to render with a tokenizer.
Chats = Callable[["PreTrainedTokenizerBase"], Iterable[Conversation]]

_WANTED = "a mapping with input_ids and labels, lists of equally many integers"


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn in the text.

    tokens: the positions of the tokens that are wholly in its content.
    stop: the first position behind its content.
    """

    message: Message
    tokens: tuple[int, ...]
    stop: int


@dataclass(frozen=True, slots=True)
class Chat:
    """A rendered chat. turns: as far as they were found in the text, in their order."""

    tokenizer: "PreTrainedTokenizerBase"
    conversation: Conversation
    ids: tuple[int, ...]
    labels: tuple[int, ...]
    turns: tuple[Turn, ...]

    @property
    def case(self) -> str:
        """The chat in words."""
        return f"a chat with {len(self.conversation.messages)} turns: {self.conversation.name}"

    def wrong_at(self, position: int, reason: str) -> Wrong:
        """The finding `reason`, shown with the tokens around `position`."""
        return Wrong(
            reason, (self.case, *show_tokens(self.tokenizer, self.ids, self.labels, position))
        )


def render_all(
    log: PropertyLog,
    subject: Subject,
    render: Render,
    tokenizer: "PreTrainedTokenizerBase",
    chats: Chats,
) -> Iterator[Chat]:
    """Every one of the chats that can be rendered; templates may refuse a system's turn, which is noted."""
    for conversation in chats(tokenizer):
        try:
            rendered = render_chat(subject, render, tokenizer, conversation, None)
        except RaisedError as error:
            if conversation is not WITH_SYSTEM:
                raise
            log.note(f"a system's turn is refused: {str(error).splitlines()[0]}")
            continue
        if rendered is None:
            raise subject.returned("None for a chat that nothing limits", _WANTED)
        ids, labels = rendered
        turns = tuple(_find_turns(tokenizer, ids, conversation.messages))
        yield Chat(tokenizer, conversation, ids, labels, turns)


def render_chat(
    subject: Subject,
    render: Render,
    tokenizer: "PreTrainedTokenizerBase",
    conversation: Conversation,
    max_length: int | None,
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Ids and labels; None where the chat is dropped. Raises: RaisedError."""
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
    tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int], messages: Sequence[Message]
) -> Iterator[Turn]:
    """The turns up to the first whose content is not in the text behind the one before."""
    ends = _letters_until(tokenizer, ids)
    text = _decode(tokenizer, ids)
    begins = [0, *ends[:-1]]
    searched = 0
    for message in messages:
        begin = text.find(message["content"], searched)
        if begin < 0:
            return
        stop = begin + len(message["content"])
        # A token that only completes the bytes of a letter adds none: its letter is the last one.
        tokens = tuple(
            at for at, end in enumerate(ends) if begin <= begins[at] and begin < end <= stop
        )
        behind = next((at for at, end in enumerate(ends) if end > stop), len(ids))
        yield Turn(message, tokens, behind)
        searched = stop


def _letters_until(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int]) -> list[int]:
    """For each token, how many letters of the text it and those before it make."""
    ends = [len(_decode(tokenizer, ids[: number + 1])) for number in range(len(ids))]
    # Bytes of an unfinished letter may be shown as several letters.
    for number in range(len(ends) - 2, -1, -1):
        ends[number] = min(ends[number], ends[number + 1])
    return ends


def _decode(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int]) -> str:
    return str(
        tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )


def control_ids(tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """The ids of special tokens, also of those that are only declared as added tokens."""
    added = tokenizer.added_tokens_decoder
    return set(tokenizer.all_special_ids) | {id_ for id_, token in added.items() if token.special}


def turn_end(chat: Chat, turn: Turn) -> int | None:
    """The position of the first special token behind a turn's content."""
    special = control_ids(chat.tokenizer)
    return next((at for at in range(turn.stop, len(chat.ids)) if chat.ids[at] in special), None)


def labelled(chat: Chat) -> list[int]:
    """The positions of the chat's label tokens."""
    return [at for at, label in enumerate(chat.labels) if label != IGNORED]
