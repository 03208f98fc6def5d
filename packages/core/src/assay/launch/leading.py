"""Work that one process does for all: under torchrun the first rank's."""

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar, cast

from assay.errors import UsageError
from assay.launch.errors import WorldError
from assay.launch.world import OUTER_VARIABLES, outer_world_size

T = TypeVar("T")

# The launcher ends all ranks when the first one ends; until then its work may take any time.
_LONGEST = timedelta(days=7)

# Between the ends of ranks that have had the same work: one that takes longer has died.
_LEAVING = timedelta(minutes=1)

_DONE = "done"


@dataclass(slots=True)
class _Works:
    """How many works this process has begun to share."""

    count: int = 0

    def begin(self) -> int:
        """The number of the next."""
        self.count += 1
        return self.count


_works = _Works()


def on_first_rank(work: Callable[[], T]) -> T:
    """What `work` returns. Under torchrun only rank 0 does it, and every rank gets what it returned.

    There it may launch worlds, whose ranks are processes of their own: it sees no variable of torchrun.
    Every rank calls this equally often. What is returned is pickled.
    Raises: on rank 0 what `work` raises, on the others WorldError.
    """
    size = outer_world_size(os.environ)
    if size is None:
        return work()
    from torch._C._distributed_c10d import PrefixStore

    from assay.launch.under_torchrun import outer_store

    store = PrefixStore(f"assay-work-{_works.begin()}", outer_store())
    number = int(os.environ["RANK"])
    if number:
        store.wait([_DONE], _LONGEST)
        done: _Done[T] = pickle.loads(bytes.fromhex(store.get(_DONE).decode()))  # noqa: S301 - of rank 0
        store.set(f"read{number}", "")
        return done.result()
    done = _Done()
    try:
        with _without_outer_variables():
            done.value = work()
    except BaseException as error:
        done.error = f"{type(error).__name__}: {error}"
        raise
    finally:
        store.set(_DONE, pickle.dumps(done).hex())
        # This process may serve the store: it stays until all have read.
        store.wait([f"read{rank}" for rank in range(1, size)])
    return done.result()


def require_one_machine() -> None:
    """Raise UsageError under a torchrun that started ranks on several machines."""
    size = outer_world_size(os.environ)
    if size is not None and os.environ.get("LOCAL_WORLD_SIZE", str(size)) != str(size):
        raise UsageError(
            f"torchrun started {size} ranks on several machines; this runs on one: --nnodes=1"
        )


def is_first_rank() -> bool:
    """Return True without torchrun, and on its rank 0."""
    return outer_world_size(os.environ) is None or os.environ["RANK"] == "0"


def leave_together() -> None:
    """Under torchrun, wait until every rank is here: called last, when everything is written.

    The launcher ends all ranks as soon as one ends with an error, in the middle of what they write.
    Nothing elsewhere, or where the ranks have shared no work. A rank that does not come within a minute
    is not waited for.
    """
    size = outer_world_size(os.environ)
    if size is None or not _works.count:
        return
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed import DistError

    from assay.launch.under_torchrun import outer_store

    store, number = PrefixStore("assay-leave", outer_store()), int(os.environ["RANK"])
    with suppress(DistError):
        store.set(f"here{number}", "")
        store.wait([f"here{rank}" for rank in range(size)], _LEAVING)
        store.set(f"left{number}", "")
        if not number:  # it may serve the store
            store.wait([f"left{rank}" for rank in range(size)], _LEAVING)


@dataclass(slots=True)
class _Done(Generic[T]):
    """What came of the work: a value, or the text of an error."""

    value: T | None = None
    error: str = ""

    def result(self) -> T:
        if self.error:
            raise WorldError(f"rank 0: {self.error}", [0])
        return cast("T", self.value)


@contextmanager
def _without_outer_variables() -> Iterator[None]:
    """Take the launcher's variables away, for this process and those that it starts."""
    taken = {name: os.environ.pop(name) for name in OUTER_VARIABLES}
    try:
        yield
    finally:
        os.environ.update(taken)
