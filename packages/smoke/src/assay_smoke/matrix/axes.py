"""The axes of the matrix as data, and a case as one value on each of them.

In a search a case is a tuple of words, one for each of `AXES` and in their order; the number of
cards is such a word too, and a feature is "no" or its own name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from assay.errors import UsageError
from assay_smoke.matrix.cases import (
    Batches,
    Case,
    Checkpoint,
    Family,
    Feature,
    Framework,
    Interruption,
    Precision,
)

# One word for each axis.
Values = tuple[str, ...]

# Numbers of cards that a matrix has: what is cheap, what a machine mostly has, and what lies between.
CARDS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Axis:
    """What can be chosen independently of the rest.

    values: the plainest first, which is taken where nothing asks for another.
    """

    name: str
    values: tuple[str, ...]
    meaning: str


_MEANING_OF_FEATURES: Mapping[Feature, str] = {
    "lora": "only an adapter is trained, the rest is frozen",
    "offload": "weights, gradients and moments are kept on the host",
    "recompute": "activations are computed anew in backward",
    "accumulation": "a step has more micro-batches than there are ranks",
    "compile": "torch.compile of every decoder layer",
}

AXES: tuple[Axis, ...] = (
    Axis("framework", get_args(Framework), "how training is spread over cards"),
    Axis("cards", tuple(map(str, CARDS)), "ranks that train, each on a card of its own"),
    Axis("family", get_args(Family), "micro model, for its kinds of attention and layers"),
    Axis("precision", get_args(Precision), "float16 with float32 weights beside, and a loss scale"),
    *(Axis(name, ("no", name), meaning) for name, meaning in _MEANING_OF_FEATURES.items()),
    Axis("batches", get_args(Batches), "padded to one length, or rows laid end to end"),
    Axis("checkpoint", get_args(Checkpoint), "what is saved, read back and compared"),
    Axis("interruption", get_args(Interruption), "where it is planned, or SIGTERM within a step"),
)
NAMES: tuple[str, ...] = tuple(axis.name for axis in AXES)


def axes_for(cards: int) -> tuple[Axis, ...]:
    """The axes of a machine with `cards` cards.

    Raises: UsageError for less than one.
    """
    if cards < 1:
        raise UsageError(f"--cards {cards}: a plan needs at least one card")
    usable = tuple(str(number) for number in CARDS if number <= cards)
    return tuple(
        Axis(axis.name, usable, axis.meaning) if axis.name == "cards" else axis for axis in AXES
    )


def values_of(case: Case) -> Values:
    """The word of `case` on each axis."""
    fields = case.model_dump(exclude={"features"})
    return tuple(
        (name if name in case.features else "no")
        if name in _MEANING_OF_FEATURES
        else str(fields[name])
        for name in NAMES
    )


def case_with(values: Values) -> Case:
    """The case that has `values`, one for each axis."""
    fields = dict(zip(NAMES, values, strict=True))
    features = {fields.pop(name) for name in _MEANING_OF_FEATURES} - {"no"}
    return Case.model_validate(fields | {"features": features})
