"""A world that torchrun or another launcher started, with this process as one of its ranks."""

import faulthandler
import os
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from assay.launch.failures import (
    Directness,
    RankReport,
    RankState,
    WorldError,
    WorldSkipped,
    failure_of,
    name_ranks,
    report_of,
    strongest,
)
from assay.launch.joining import joined
from assay.launch.world import World
from assay.progress import SilentProgress

Result = TypeVar("Result")

# Time that a rank with a failed collective waits for another rank's report of the cause.
_SETTLE_SECONDS = 2.0
# A rank that has reported answers within this time.
_POLL_SECONDS = 0.1

_numbers = count()


def call_under_torchrun(
    function: Callable[..., Result], request: object, world: World
) -> list[Result]:
    """Call `function` as the rank that RANK names, for `call`.

    Every rank reads all reports, and fails or skips as the world does. It raises an exception of its
    own body unchanged. The launcher ends the ranks.
    Returns and raises: as `call`.
    """
    number, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    # A new prefix for every world, as the store still holds earlier keys.
    store = PrefixStore(f"assay-world-{next(_numbers)}", outer_store())
    errors: list[BaseException] = []

    def body() -> object:
        try:
            return function(request, SilentProgress(), rank)
        except BaseException as error:
            errors.append(error)
            raise

    threads = torch.get_num_threads()
    torch.set_num_threads(world.threads)
    limits = world.limits
    # Without a supervisor, this rank prints its own stack after the time limit.
    faulthandler.dump_traceback_later(limits.body_seconds, exit=False)
    try:
        with joined(world, PrefixStore("group", store), number, local) as rank:
            report = report_of(body)
            store.set(f"report{number}", pickle.dumps(report).hex())
            if report.is_communication:
                # The cause is in another rank's report.
                try:
                    return _agree(world, store, report, number, _SETTLE_SECONDS)
                except WorldError as failure:
                    raise failure from errors[-1]
            if report.kind == "raised" and errors:
                raise errors[-1]
            return _agree(world, store, report, number, limits.body_seconds)
    finally:
        faulthandler.cancel_dump_traceback_later()
        torch.set_num_threads(threads)
        if dist.is_initialized():
            dist.destroy_process_group()


@cache
def outer_store() -> Store:
    """Open the store that all ranks of the launcher share."""
    store: Store
    store, _, _ = next(rendezvous("env://"))
    return store


def _agree(world: World, store: Store, own: RankReport, number: int, seconds: float) -> list[Any]:
    """Read the reports of all ranks. Returns and raises: as `call`.

    own: the report of this rank, `number`; seconds: the time to wait for the others.
    """
    states = {number: RankState(report=own)}
    silent = []
    deadline = time.monotonic() + seconds
    for rank in range(world.size):
        left = max(deadline - time.monotonic(), _POLL_SECONDS)
        try:
            store.wait([f"report{rank}"], timedelta(seconds=left))
        except dist.DistError:
            silent.append(rank)
            continue
        data = bytes.fromhex(store.get(f"report{rank}").decode())
        states[rank] = RankState(report=pickle.loads(data))  # noqa: S301 - written by a rank
    found = strongest(states)
    if silent and (found is None or found[0] is Directness.COMMUNICATION):
        raise WorldError(
            f"{name_ranks(silent)} of {world} did not report within {seconds:g} s after rank"
            f" {number} had",
            silent,
        )
    if found:
        raise failure_of(world, states, found)
    if own.kind == "skipped":
        raise WorldSkipped(own.summary)
    # Rank 0 serves the store, so it must stay until all ranks have read.
    dist.barrier()
    return [pickle.loads(state.report.value) for _, state in sorted(states.items()) if state.report]  # noqa: S301
