"""Checks chats that are too long: cut at one end with matching labels, or dropped."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from assay_smoke.data.properties import PropertyLog, Subject, Violation
from assay_smoke.data.protocols import IGNORED, Render, Tokenizer
from assay_smoke.data.text.rendering import render_chat
from assay_smoke.data.tokens import LONG, show_row, show_tokens

# Declared treatment of a chat that is too long.
Truncation = Literal["keep-start", "keep-end", "drop"]

Rendered = tuple[tuple[int, ...], tuple[int, ...]]


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
        if ids == whole[: len(ids)]:
            return 0
        begin = len(whole) - len(ids)
        return begin if ids == whole[begin:] else None


def cut_chats(subject: Subject, render: Render, tokenizer: Tokenizer) -> Iterator[Cut]:
    """Yield one chat cut to several lengths, the longest first."""
    whole = render_chat(subject, render, tokenizer, LONG, None)
    if whole is None:
        return
    size = len(whole[0])
    for most in sorted({size - 1, 3 * size // 4, size // 2, size // 4, 2}, reverse=True):
        yield Cut(tokenizer, whole, most, render_chat(subject, render, tokenizer, LONG, most))


def judge_cut_text(log: PropertyLog, name: str, cut: Cut, declared: Truncation | None) -> None:
    """Judge the remaining tokens as the property `name`. Without a declaration, either end may remain."""
    log.judge(name, _find_wrong_text(cut, declared))
    if cut.rendered is None:
        log.note("chats that are too long are dropped")
    elif cut.start is not None:
        log.note(f"chats that are too long keep their {'end' if cut.start else 'start'}")


def _find_wrong_text(cut: Cut, declared: Truncation | None) -> Violation | None:
    if cut.rendered is None:
        if declared in (None, "drop"):
            return None
        reason = f"a chat that is too long is dropped, but {declared} is declared"
        return Violation(reason, (cut.case,))
    ids = cut.rendered[0]
    last = "ends with: " + show_row(cut.tokenizer, ids[-4:])
    shown = (cut.case, f"begins with: {show_row(cut.tokenizer, ids[:4])}", last)
    if len(ids) > cut.most:
        return Violation(f"{len(ids)} tokens remain, at most {cut.most} are wanted", shown)
    if cut.start is None:
        reason = "the remaining tokens are neither the start nor the end of the chat"
        if ids[:-1] == cut.whole[0][: len(ids) - 1]:
            reason = "a cut chat gets an extra end token: a model learns to stop in the middle"
        return Violation(reason, shown)
    kept: Truncation = "keep-end" if cut.start else "keep-start"
    if declared not in (None, kept):
        return Violation(f"truncation is {kept}, but {declared} is declared", shown)
    return None


def judge_cut_labels(log: PropertyLog, name: str, cut: Cut) -> None:
    """Judge as the property `name` whether the remaining tokens keep their labels."""
    if cut.rendered is None or cut.start is None:
        log.judge(name, None)  # dropped, or judged as wrong text already
        return
    ids, actual = cut.rendered
    expected = cut.whole[1][cut.start : cut.start + len(ids)]
    at = next((at for at in range(len(ids)) if actual[at] != expected[at]), None)
    if at is None:
        log.judge(name, None)
        if all(label == IGNORED for label in actual):
            log.note("a cut chat may have no labels, so that its loss is 0/0")
        return
    lost = sum(one == IGNORED != other for one, other in zip(actual, expected, strict=True))
    total = sum(label != IGNORED for label in expected)
    reason = f"{lost} of {total} labels of the remaining tokens are lost"
    if not lost:
        reason = "tokens without a label in the whole chat have one in the cut chat"
    log.judge(name, Violation(reason, (cut.case, *show_tokens(cut.tokenizer, ids, actual, at))))
