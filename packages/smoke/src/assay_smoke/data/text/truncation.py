"""Chats that are too long: cut at one end with the labels that belong there, or dropped."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from assay_smoke.data.properties import PropertyLog, Wrong
from assay_smoke.data.protocols import IGNORED, Render
from assay_smoke.data.running_code import Subject
from assay_smoke.data.text.rendering import render_chat
from assay_smoke.data.tokens.conversations import LONG
from assay_smoke.data.tokens.shown_tokens import show_row, show_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What is done with a chat that is too long, where it is declared.
Truncation = Literal["keep-start", "keep-end", "drop"]

Rendered = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Cut:
    """A chat of which at most `most` tokens were wanted; rendered: None if it was dropped."""

    tokenizer: "PreTrainedTokenizerBase"
    whole: Rendered
    most: int
    rendered: Rendered | None

    @property
    def case(self) -> str:
        """The chat in words."""
        side = self.tokenizer.truncation_side
        whole = len(self.whole[0])
        return f"a chat of {whole} tokens, at most {self.most} wanted, truncation_side {side}"

    @property
    def start(self) -> int | None:
        """Where the tokens that are left begin in the whole chat; None if they are no end of it."""
        if self.rendered is None:
            return None
        ids, whole = self.rendered[0], self.whole[0]
        if ids == whole[: len(ids)]:
            return 0
        begin = len(whole) - len(ids)
        return begin if ids == whole[begin:] else None


def cut_chats(
    subject: Subject, render: Render, tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[Cut]:
    """One chat at several lengths, the longest that has to be cut first."""
    whole = render_chat(subject, render, tokenizer, LONG, None)
    if whole is None:
        return
    size = len(whole[0])
    for most in sorted({size - 1, 3 * size // 4, size // 2, size // 4, 2}, reverse=True):
        yield Cut(tokenizer, whole, most, render_chat(subject, render, tokenizer, LONG, most))


def judge_cut_text(log: PropertyLog, name: str, cut: Cut, declared: Truncation | None) -> None:
    """Judge as the property `name` which tokens are left; without a declaration any end may be."""
    log.judge(name, _find_wrong_text(cut, declared))
    if cut.rendered is None:
        log.note("chats that are too long are dropped")
    elif cut.start is not None:
        log.note(f"chats that are too long keep their {'end' if cut.start else 'start'}")


def _find_wrong_text(cut: Cut, declared: Truncation | None) -> Wrong | None:
    if cut.rendered is None:
        if declared in (None, "drop"):
            return None
        return Wrong(f"a chat that is too long is dropped, declared is {declared}", (cut.case,))
    ids = cut.rendered[0]
    last = "ends with: " + show_row(cut.tokenizer, ids[-4:])
    shown = (cut.case, f"begins with: {show_row(cut.tokenizer, ids[:4])}", last)
    if len(ids) > cut.most:
        return Wrong(f"{len(ids)} tokens are left, at most {cut.most} are wanted", shown)
    if cut.start is None:
        reason = "what is left is neither the start nor the end of the chat"
        if ids[:-1] == cut.whole[0][: len(ids) - 1]:
            reason = "a cut chat gets an end of its own: a model learns to stop in the middle"
        return Wrong(reason, shown)
    kept: Truncation = "keep-end" if cut.start else "keep-start"
    if declared not in (None, kept):
        return Wrong(f"truncation is {kept}, declared is {declared}", shown)
    return None


def judge_cut_labels(log: PropertyLog, name: str, cut: Cut) -> None:
    """Judge as the property `name` whether the tokens that are left have the labels they had."""
    if cut.rendered is None or cut.start is None:
        log.judge(name, None)  # there is none, or the text is wrong already
        return
    ids, actual = cut.rendered
    expected = cut.whole[1][cut.start : cut.start + len(ids)]
    at = next((at for at in range(len(ids)) if actual[at] != expected[at]), None)
    if at is None:
        log.judge(name, None)
        if all(label == IGNORED for label in actual):
            log.note("a chat may be cut to one without labels, whose loss is 0/0")
        return
    lost = sum(one == IGNORED != other for one, other in zip(actual, expected, strict=True))
    total = sum(label != IGNORED for label in expected)
    reason = f"{lost} of the {total} labels that the tokens left have in the whole chat are lost"
    if not lost:
        reason = "tokens that have no label in the whole chat have one in the cut chat"
    log.judge(name, Wrong(reason, (cut.case, *show_tokens(cut.tokenizer, ids, actual, at))))
