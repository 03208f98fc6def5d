"""The axes of the matrix, and a case as one word per axis.

The search handles a case as a tuple of words in the order of `AXES`. The number of cards is such a
word. A feature is "no" or its own name.
"""

from dataclasses import dataclass, replace
from typing import get_args

from assay.errors import UsageError
from assay_smoke.matrix.cases import (
    FEATURES,
    Batches,
    Case,
    Checkpoint,
    Family,
    Framework,
    Interruption,
    Precision,
)

# One word per axis.
Values = tuple[str, ...]

# One card, the usual numbers of a machine, and the number between them.
CARDS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Axis:
    """An independent choice."""

    name: str
    values: tuple[str, ...]
    """Words, the plainest first. The planner prefers it."""
    meaning: str


AXES: tuple[Axis, ...] = (
    Axis("framework", get_args(Framework), "how training is spread over cards"),
    Axis("cards", tuple(map(str, CARDS)), "number of ranks, each on its own card"),
    Axis(
        "family", get_args(Family), "micro model, which decides the kinds of attention and layers"
    ),
    Axis("precision", get_args(Precision), "float16 has float32 master weights and a scaled loss"),
    *(Axis(name, ("no", name), entry.meaning) for name, entry in FEATURES.items()),
    Axis("batches", get_args(Batches), "padded to one length, or rows laid end to end"),
    Axis("checkpoint", get_args(Checkpoint), "what is saved, read back and compared"),
    Axis("interruption", get_args(Interruption), "between steps, or by SIGTERM within a step"),
)
NAMES: tuple[str, ...] = tuple(axis.name for axis in AXES)


def axes_for(cards: int) -> tuple[Axis, ...]:
    """Return the axes of a machine with `cards` cards.

    Raises: UsageError for fewer than one.
    """
    if cards < 1:
        raise UsageError(f"--cards {cards}: a plan needs at least one card")
    usable = tuple(str(number) for number in CARDS if number <= cards)
    return tuple(replace(axis, values=usable) if axis.name == "cards" else axis for axis in AXES)


def values_of(case: Case) -> Values:
    """Return the word of `case` on each axis."""
    fields = case.model_dump(exclude={"features"})
    return tuple(
        (name if name in case.features else "no") if name in FEATURES else str(fields[name])
        for name in NAMES
    )


def case_with(values: Values) -> Case:
    """Return the case with these words."""
    fields = dict(zip(NAMES, values, strict=True))
    features = {fields.pop(name) for name in FEATURES} - {"no"}
    return Case.model_validate(fields | {"features": features})
