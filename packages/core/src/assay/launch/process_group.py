"""A rank joins its world: device, process group, mesh; also a world that torchrun started. Imports torch."""

import faulthandler
import os
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous

from assay.devices.registry import (
    adapter_names,
    is_host_adapter,
    load_adapter,
    open_device,
)
from assay.devices.run_string import parse_device
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
from assay.launch.world import Rank, World
from assay.progress import SilentProgress

if TYPE_CHECKING:
    from assay.devices.base import Device

# Loaded once in the fork server, as reading all entry points would take each rank 30 ms. Adapters of
# the host load no driver.
_HOST_ADAPTERS = {kind: load_adapter(kind) for kind in adapter_names() if is_host_adapter(kind)}

HOST_BACKEND = "gloo"
_LOOPBACK = Path("/sys/class/net/lo")


def file_store(folder: Path, world: World) -> Store:
    """Make a store in a file of `folder`, so that worlds need no free port."""
    store = FileStore(str(folder / "rendezvous"), world.size)
    store.set_timeout(timedelta(seconds=world.limits.start_seconds))
    return store


@contextmanager
def joined(world: World, store: Store, number: int, local: int) -> Iterator[Rank]:
    """Open the device of rank `number` and join the process group; leave it unless the body raises.

    Collective. Inside the context the rank's device is the current one.
    """
    device = open_rank_device(world.device, local)
    kind = torch.device(device.torch_device).type
    on_host = kind == "cpu"
    backend = HOST_BACKEND
    if not on_host:
        # Offloaded parameters and checkpoints also need collectives on the host.
        backend = f"cpu:{HOST_BACKEND},{kind}:{device.vendor.distributed_backend}"
    with nullcontext() if on_host else device.execution():
        dist.init_process_group(
            backend,
            store=store,
            rank=number,
            world_size=world.size,
            timeout=timedelta(seconds=world.limits.start_seconds),
        )
        mesh = init_device_mesh(kind, tuple(world.axes.values()), mesh_dim_names=tuple(world.axes))
        # The group was made with the time limit of the start.
        limit = timedelta(seconds=world.limits.collective_seconds)
        for group in (None, *(mesh.get_group(axis) for axis in world.axes)):
            c10d._set_pg_timeout(limit, group)  # noqa: SLF001 - torch has no public name
        yield Rank(number, local, world.size, dict(world.axes), device, mesh)
        dist.destroy_process_group()


def open_rank_device(name: str, local: int) -> "Device":
    """Open the device `name`; for an accelerator without an index, the one numbered `local`.

    Raises: as `assay.devices.registry.open_device`.
    """
    device = parse_device(name)
    if device.kind in _HOST_ADAPTERS:
        return _HOST_ADAPTERS[device.kind](device.variant)
    has_index = device.variant or device.kind not in adapter_names()
    return open_device(name if has_index else f"{device.kind}:{local}")


def use_loopback() -> None:
    """Let gloo use the loopback device, so that it needs neither a host name nor a network."""
    if _LOOPBACK.exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK.name)


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
