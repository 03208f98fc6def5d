"""A function that another process calls, named so that this process need not import it."""

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

Request = TypeVar("Request")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RemoteFunction(Generic[Request, Result]):
    """A function `(Request, Progress) -> Result`. On ranks it also takes a `Rank`.

    Both types must be picklable.
    """

    path: str
    """MODULE:FUNCTION."""
    preload: Sequence[str] = ()
    """Slow modules, which the fork server imports once for all processes."""

    def load(self) -> Callable[..., Result]:
        """Import the module and return the function."""
        return cast("Callable[..., Result]", pkgutil.resolve_name(self.path))
