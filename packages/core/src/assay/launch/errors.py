"""What can go wrong with a world of ranks, and how it is said."""

from collections.abc import Sequence

from assay.errors import MachineError, UsageError


class RankSkipped(Exception):  # noqa: N818 - no error: how a body says that it cannot run here
    """Raised by a body: this rank has nothing to do here. The world skips if all ranks do."""


class WorldSkipped(Exception):  # noqa: N818 - as RankSkipped
    """All ranks of the world skipped."""


class WorldError(MachineError):
    """A world in which not every rank returned, or not every rank ended well.

    ranks: the ranks whose failure is told first; the others' may be its consequences.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class WorldHungError(WorldError):
    """A world of which ranks were still at work when its time was over."""


class ForkServerError(MachineError):
    """The process that forks ranks cannot do so."""

    @classmethod
    def ended(cls, how: str) -> "ForkServerError":
        """It is gone."""
        return cls(f"the process that forks ranks {how}")

    @classmethod
    def refused(cls, traceback: str) -> "ForkServerError":
        """It raised, mostly because a preloaded module did."""
        return cls(f"the process that forks ranks could not start a world:\n{traceback}")


class WorldSizeError(UsageError):
    """The body wants another number of ranks than there are."""

    @classmethod
    def outer(cls, world: object, size: int) -> "WorldSizeError":
        """The launcher of this process started `size` ranks."""
        return cls(f"the body needs {world}, but the launcher of this process started {size}")

    @classmethod
    def nested(cls) -> "WorldSizeError":
        """A rank starts a world."""
        return cls("a rank cannot start a world of its own: start it outside of the first")


class UnsendableError(UsageError):
    """A value that cannot travel between the ranks and the process that launches them."""

    @classmethod
    def of(cls, what: str, value: object, error: BaseException) -> "UnsendableError":
        """`what`: its name to the user; `error`: what pickle said."""
        return cls(
            f"{what} cannot travel to the ranks: {type(value).__name__}: {error}. "
            "What reaches a rank is pickled; make it inside of the body instead"
        )

    @classmethod
    def of_main(cls, name: str) -> "UnsendableError":
        """A function of the script that runs."""
        return cls(
            f"{name} is defined in the script that runs; ranks import what they call: move it to "
            "a module"
        )
