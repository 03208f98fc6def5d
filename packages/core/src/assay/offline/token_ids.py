"""Comparing the token ids of two dumps: prompts first, then what was generated from them."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from assay.offline.tokens import PassPair, TokenAlignment

LogitsOf = Callable[[PassPair], tuple[Tensor, Tensor] | None]


@dataclass(frozen=True, slots=True)
class DifferentToken:
    """The first token of a prompt that differs. is_prompt: it was given, not generated."""

    prompt: int
    position: int
    expected: int
    actual: int
    is_prompt: bool
    is_near_tie: bool | None = None
    """Whether each side chose the largest of its logits; None if the logits are not in both dumps."""

    def __str__(self) -> str:
        """Name the place and both ids."""
        return (
            f"prompt {self.prompt}, position {self.position}:"
            f" token {self.actual}, expected {self.expected}"
        )


@dataclass(slots=True)
class TokenComparison:
    """The ids of all paired passes."""

    num_prompt_tokens: int = 0
    num_generated: int = 0
    different: list[DifferentToken] = field(default_factory=list)
    excluded: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """By batch and step, the batch rows whose tokens differ up to there, (B,) bool."""

    @property
    def different_prompts(self) -> list[DifferentToken]:
        """Return the differences in what was given."""
        return [one for one in self.different if one.is_prompt]

    @property
    def different_generated(self) -> list[DifferentToken]:
        """Return the differences in what was generated."""
        return [one for one in self.different if not one.is_prompt]


def compare_ids(alignment: TokenAlignment, logits_of: LogitsOf) -> TokenComparison:
    """Compare the ids pass by pass. After its first different token, a prompt is excluded.

    logits_of: returns the logits of a pass, expected and actual, (B, T, V); None if a dump lacks them.
    """
    found = TokenComparison()
    gone: dict[int, Tensor] = {}
    previous: PassPair | None = None
    for pair in alignment.pairs:
        expected, actual, rows = pair.expected.ids, pair.actual.ids, pair.expected.rows
        if expected is None or actual is None or rows is None or expected.shape != actual.shape:
            continue
        known = gone.get(pair.expected.batch, torch.zeros(rows.num_rows, dtype=torch.bool))
        follows = previous is not None and previous.expected.batch == pair.expected.batch
        is_prompt = not follows or rows.length > 1
        different = (expected != actual) & (torch.tensor(rows.positions) >= 0)
        for row in (different.any(1) & ~known).nonzero()[:, 0].tolist():
            column = int(different[row].int().argmax())
            tie = None if is_prompt or previous is None else _is_near_tie(
                logits_of(previous), row, int(expected[row, column]), int(actual[row, column])
            )  # fmt: skip
            found.different.append(
                DifferentToken(
                    rows.prompts[row], rows.positions[row][column],
                    int(expected[row, column]), int(actual[row, column]), is_prompt, tie,
                )
            )  # fmt: skip
        known = known | different.any(1)
        gone[pair.expected.batch] = known
        if bool(known.any()):
            found.excluded[pair.expected.batch, pair.expected.step] = known
        count = int((torch.tensor(rows.positions) >= 0).sum())
        found.num_prompt_tokens += count if is_prompt else 0
        found.num_generated += 0 if is_prompt else count
        previous = pair
    return found


def _is_near_tie(
    logits: tuple[Tensor, Tensor] | None, row: int, expected: int, actual: int
) -> bool | None:
    """Return True if each side chose the largest of its own logits."""
    if logits is None:
        return None
    chosen = [int(one[row, -1].argmax()) for one in logits]
    return chosen == [expected, actual]
