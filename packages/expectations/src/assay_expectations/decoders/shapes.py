"""Input shapes of decoders."""

from dataclasses import dataclass
from typing import Self

from assay.errors import UsageError


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one generation."""

    batch_size: int
    prompt_length: int
    max_new_tokens: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `4x64x16`: rows, prompt length, new tokens. Raises: UsageError."""
        parts = text.lower().split("x")
        if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise UsageError(
                f"shape {text!r}: expected rows, prompt length and new tokens, such as 4x64x16"
            )
        return cls(*map(int, parts))

    def __str__(self) -> str:
        return f"{self.batch_size}x{self.prompt_length}x{self.max_new_tokens}"
