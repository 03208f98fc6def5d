"""A rank joins its world: device, process group, mesh. Imports torch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import FileStore, Store
from torch.distributed.device_mesh import init_device_mesh

from assay.devices.registry import (
    adapter_names,
    is_host_adapter,
    load_adapter,
    open_device,
)
from assay.devices.run_string import parse_device
from assay.launch.world import Rank, World

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


_COMMUNICATION_WORDS = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "pair closure",
    "Connection refused",
)


def is_communication_error(error: BaseException | None) -> bool:
    """Return True if `error`, or a cause of it, means only that another rank did not answer.

    gloo raises plain RuntimeErrors, so this searches their messages.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, dist.DistError):
            return True
        if isinstance(error, RuntimeError) and any(
            words in str(error) for words in _COMMUNICATION_WORDS
        ):
            return True
        error = error.__cause__ or error.__context__
    return False
