"""The steps, tokens and modules that a capture records."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from assay.errors import UsageError
from assay.sites import CallSite

_RANGE = re.compile(r"(\d{1,18})(:(\d{0,18}))?")
_ENDLESS = 1 << 62


@dataclass(frozen=True, slots=True)
class Ranges:
    """Numbers from 0, such as `0,100:102`: 0, 100 and 101."""

    spans: tuple[range, ...]

    @classmethod
    def parse(cls, text: str) -> "Ranges":
        """Parse numbers and half-open ranges. The end of a range may be left out.

        Raises: UsageError.
        """
        spans = []
        for word in text.split(","):
            found = _RANGE.fullmatch(word.strip())
            if found is None:
                raise UsageError(f"{text[:40]!r} is not a list of ranges such as 0,100:102")
            first = int(found[1])
            end = first + 1 if found[2] is None else int(found[3]) if found[3] else _ENDLESS
            if end <= first:
                raise UsageError(
                    f"{word.strip()!r} is empty: a range ends before its second number"
                )
            spans.append(range(first, end))
        return cls(tuple(spans))

    def __contains__(self, number: int) -> bool:
        return any(number in span for span in self.spans)


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Passes to ignore: the first ones, or those whose first tensor has a shape."""

    num_passes: int = 0
    shape: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, text: str) -> "WarmUp":
        """Parse a number of passes, or a shape such as `8x512`.

        Raises: UsageError.
        """
        words = text.lower().split("x")
        if not all(word.isdecimal() and len(word) < 10 for word in words):
            raise UsageError(
                f"warmup={text[:40]!r} is neither a number of passes nor a shape such as 8x512"
            )
        numbers = tuple(map(int, words))
        return cls(numbers[0]) if len(numbers) == 1 else cls(shape=numbers)

    def has_pass(self, number: int, shape: tuple[int, ...] | None) -> bool:
        """Return True for a warm-up pass. number: among all passes, from 0."""
        return number < self.num_passes or (shape is not None and shape == self.shape)


@dataclass(frozen=True, slots=True)
class CaptureFilter:
    """Selects the calls to record."""

    include: Sequence[str] = ("*",)
    """Globs of module paths. The model itself has the path ""."""
    exclude: Sequence[str] = ()
    steps: Ranges | None = None
    """Optimizer steps, or forward passes of a run without an optimizer. None for all."""
    tokens: Ranges | None = None
    """Forward passes, counted from 0 for each prefill. None for all."""
    warmup: WarmUp = WarmUp()
    """Passes that are not counted."""

    @classmethod
    def parse(
        cls,
        *,
        include: str | Sequence[str] = ("*",),
        exclude: str | Sequence[str] = (),
        steps: object = None,
        tokens: object = None,
        warmup: object = None,
    ) -> "CaptureFilter":
        """Parse the options of a capture. Raises: UsageError."""
        return cls(
            (include,) if isinstance(include, str) else include,
            (exclude,) if isinstance(exclude, str) else exclude,
            None if steps is None else Ranges.parse(str(steps)),
            None if tokens is None else Ranges.parse(str(tokens)),
            WarmUp() if warmup is None else WarmUp.parse(str(warmup)),
        )

    def has_module(self, path: str) -> bool:
        """Return True if the calls of a module are recorded."""
        return any(fnmatchcase(path, glob) for glob in self.include) and not any(
            fnmatchcase(path, glob) for glob in self.exclude
        )

    def has_pass(self, site: CallSite, token: int) -> bool:
        """Return True if a forward pass is recorded. token: its number since the last prefill."""
        return (self.steps is None or site.step in self.steps) and (
            self.tokens is None or token in self.tokens
        )
