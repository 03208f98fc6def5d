"""Records of a trainer's state. Importing it imports no torch."""

from dataclasses import dataclass

from assay.verdicts import Number, Record


@dataclass(frozen=True, slots=True, order=True)
class StateValue:
    """The address of one value in a trainer's state."""

    path: str
    """The full path, as a verdict names it."""
    part: str
    """One of "model", "moments", "optimizer", "generators", or a key that the trainer adds."""
    parameter: str | None = None
    """Name of the parameter or buffer in the unwrapped model; None for any other value."""


@dataclass(frozen=True, slots=True)
class HeldPart:
    """The part of a parameter, or of one of its optimizer moments, that a rank holds."""

    parameter: str
    moment: str | None = None
    """Name of the moment; None for the parameter itself."""
    coordinates: tuple[tuple[int, int], ...] = ()
    """Number of each mesh axis that divides the value, and the rank's place on that axis.

    Ranks with equal coordinates hold the same part.
    """

    def __str__(self) -> str:
        name = self.parameter if self.moment is None else f"{self.parameter} {self.moment}"
        return name + "".join(f"|{axis}={place}" for axis, place in self.coordinates)


class TrajectoryRecord(Record):
    """How far a parameter at the end of a free run is from where the recorded steps end."""

    parameter: str
    error: Number
    """Median over the elements of the absolute difference."""
    size: Number
    """Median absolute value at the end of the recorded steps."""
