"""Errors of worlds of ranks, and their messages."""

from collections.abc import Sequence

from assay.errors import MachineError, UsageError


class RankSkipped(Exception):  # noqa: N818 - not an error
    """Raised by a body that cannot run on this rank. The world is skipped if all ranks raise it."""


class WorldSkipped(Exception):  # noqa: N818 - not an error
    """Raised by `launch_world` if all ranks of the world raised RankSkipped."""


class WorldError(MachineError):
    """A world in which a rank did not return, or ended with an error after it returned.

    ranks: the ranks whose failure is reported first; it may have caused the others' failures.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class WorldHungError(WorldError):
    """A world whose time limit passed before all of its ranks had reported."""


class UnsendableError(UsageError):
    """A value that cannot be pickled for, or by, a rank."""

    @classmethod
    def of(cls, what: str, value: object, error: BaseException) -> "UnsendableError":
        """Make the error for `value`, called `what`, from pickle's `error`."""
        return cls(
            f"{what} cannot travel to the ranks: {type(value).__name__}: {error}. "
            "What reaches a rank is pickled; make it inside of the body instead"
        )
