"""Work that one process does for all: under torchrun, rank 0."""

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar, cast

from assay.errors import UsageError
from assay.launch.failures import WorldError
from assay.launch.world import OUTER_VARIABLES, outer_world_size

T = TypeVar("T")

# The launcher ends all ranks when the first one ends; until then its work may take any time.
_LONGEST = timedelta(days=7)

# Longest time between the ends of ranks; a slower one has died.
_LEAVING = timedelta(minutes=1)

_DONE = "done"


# The works that this process has begun to share, by number.
_begun: list[int] = []


def on_first_rank(work: Callable[[], T]) -> T:
    """Return the value of `work()`. Under torchrun only rank 0 calls it, and all ranks get the value.

    `work` sees no variable of torchrun, so that it may launch worlds. The value is pickled. Every rank
    must call this equally often.
    Raises: on rank 0 what `work` raises, on the others WorldError.
    """
    size = outer_world_size(os.environ)
    if size is None:
        return work()
    from torch._C._distributed_c10d import PrefixStore

    from assay.launch.process_group import outer_store

    _begun.append(len(_begun) + 1)
    store = PrefixStore(f"assay-work-{_begun[-1]}", outer_store())
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
        # This process may serve the store, so it waits until all have read.
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
    """Under torchrun, wait at most a minute until every rank calls this, after its last write.

    The launcher ends all ranks, even while they write, as soon as one ends with an error. Does nothing
    if the ranks have shared no work.
    """
    size = outer_world_size(os.environ)
    if size is None or not _begun:
        return
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed import DistError

    from assay.launch.process_group import outer_store

    store, number = PrefixStore("assay-leave", outer_store()), int(os.environ["RANK"])
    with suppress(DistError):
        store.set(f"here{number}", "")
        store.wait([f"here{rank}" for rank in range(size)], _LEAVING)
        store.set(f"left{number}", "")
        if not number:  # it may serve the store
            store.wait([f"left{rank}" for rank in range(size)], _LEAVING)


@dataclass(slots=True)
class _Done(Generic[T]):
    """The result of the work: a value, or the text of an error."""

    value: T | None = None
    error: str = ""

    def result(self) -> T:
        if self.error:
            raise WorldError(f"rank 0: {self.error}", [0])
        return cast("T", self.value)


@contextmanager
def _without_outer_variables() -> Iterator[None]:
    """Remove the launcher's variables from this process and those that it starts."""
    taken = {name: os.environ.pop(name) for name in OUTER_VARIABLES}
    try:
        yield
    finally:
        os.environ.update(taken)
