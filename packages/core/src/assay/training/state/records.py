"""What is reported of a trainer's state: values by where they lie, and where parameters end."""

from dataclasses import dataclass

from assay.verdicts import Number, Record


@dataclass(frozen=True, slots=True, order=True)
class StateValue:
    """One value of a trainer's state.

    path: all of where it lies, as a verdict names it.
    part: of the state: "model", "moments", "optimizer", "generators", or what a trainer adds.
    parameter: the parameter or buffer, as the unwrapped model calls it, that the value is; None for
        all other values.
    """

    path: str
    part: str
    parameter: str | None = None


@dataclass(frozen=True, slots=True)
class HeldPart:
    """What one rank has of a parameter, or of a moment that the optimizer keeps for it.

    moment: name of the moment; None for the parameter itself.
    coordinates: for each mesh axis that divides the value its number and the rank's place on it.
        Ranks with equal coordinates have the same part.
    """

    parameter: str
    moment: str | None = None
    coordinates: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        name = self.parameter if self.moment is None else f"{self.parameter} {self.moment}"
        return name + "".join(f"|{axis}={place}" for axis, place in self.coordinates)


class TrajectoryRecord(Record):
    """Where a free run takes a parameter: medians over its elements.

    error: distance from where the recorded steps end; size: of the values there.
    """

    parameter: str
    error: Number
    size: Number
