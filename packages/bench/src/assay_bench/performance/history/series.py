"""What is kept of many runs: for each kind of machine, model and suite one ratio a run."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class SeriesKey:
    """What has to be equal for ratios to be compared.

    machine: its kind, as in `PerformanceResult`.
    """

    machine: str
    run: str
    model: str
    suite: str

    @property
    def place(self) -> str:
        """What all suites of a run have in common."""
        return f"{self.model} on {self.run}, {self.machine}"


@dataclass(frozen=True, slots=True)
class Point:
    """One run.

    date: when it was measured, ISO 8601 in UTC. ratio: how many times as long as its control.
    software: versions and commit, for people.
    """

    date: str
    ratio: float
    software: str


@dataclass(frozen=True, slots=True)
class Series:
    """The runs of one key, in the order of their dates."""

    key: SeriesKey
    points: tuple[Point, ...]

    @property
    def ratios(self) -> list[float]:
        """Of all points."""
        return [point.ratio for point in self.points]
