"""Comparison of the token ids of two dumps: prompts, then generated tokens."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from assay.offline.tokens.alignment import TokenAlignment

# Returns expected and actual logits at a prompt and position, (V,); None if unknown.
LogitsOf = Callable[[int, int], tuple[Tensor, Tensor] | None]


@dataclass(frozen=True, slots=True)
class DifferentToken:
    """The first token of a prompt that differs."""

    prompt: int
    position: int
    expected: int
    actual: int
    is_prompt: bool
    """True for a token of the prompt, False for a generated token."""
    is_near_tie: bool | None = None
    """True if each side chose its largest logit; None unless both dumps hold the logits."""

    def __str__(self) -> str:
        """Return the position and both ids."""
        return (
            f"prompt {self.prompt}, position {self.position}:"
            f" token {self.actual}, expected {self.expected}"
        )


@dataclass(slots=True)
class TokenComparison:
    """The comparison of the ids of all paired tokens."""

    num_prompt_tokens: int = 0
    num_generated: int = 0
    different: list[DifferentToken] = field(default_factory=list)

    @property
    def first_different(self) -> dict[int, int]:
        """Return by prompt the position of the first different token."""
        return {one.prompt: one.position for one in self.different}

    @property
    def different_prompts(self) -> list[DifferentToken]:
        """Return the differences in prompts."""
        return [one for one in self.different if one.is_prompt]

    @property
    def different_generated(self) -> list[DifferentToken]:
        """Return the differences in generated tokens."""
        return [one for one in self.different if not one.is_prompt]


def compare_ids(alignment: TokenAlignment, logits_of: LogitsOf) -> TokenComparison:
    """Compare the ids of all paired tokens. Only the first difference of each prompt counts."""
    found = TokenComparison()
    seen: set[int] = set()
    begun: set[int] = set()
    for pair in alignment.pairs:
        expected, actual, rows = pair.expected.ids, pair.actual.ids, pair.rows
        if expected is None or actual is None or rows is None or pair.expected.rows is None:
            continue
        if pair.expected_rows is not None and pair.actual_rows is not None:
            expected = expected.flatten()[pair.expected_rows][:, None]
            actual = actual.flatten()[pair.actual_rows][:, None]
        if expected.shape != actual.shape:
            continue
        is_first = not begun & set(rows.prompts)
        is_prompt = is_first or pair.expected.rows.length > 1
        begun |= set(rows.prompts)
        is_token = torch.tensor(rows.positions) >= 0
        count = int(is_token.sum())
        found.num_prompt_tokens += count if is_prompt else 0
        found.num_generated += 0 if is_prompt else count
        for row, column in ((expected != actual) & is_token).nonzero().tolist():
            prompt, position = rows.prompts[row], rows.positions[row][column]
            if prompt in seen:
                continue
            seen.add(prompt)
            ids = int(expected[row, column]), int(actual[row, column])
            logits = None if is_prompt else logits_of(prompt, position - 1)
            tie = None if logits is None else [int(one.argmax()) for one in logits] == [*ids]
            found.different.append(DifferentToken(prompt, position, *ids, is_prompt, tie))
    return found
