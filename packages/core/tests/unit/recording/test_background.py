"""Layouts of DTensors, on one of four ranks that do not communicate."""

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from assay.comparison.measuring.placed_parts import place_declared
from assay.dumps.protocol import DumpedTensor
from assay.recording.capture import capture
from assay.recording.recorders import BackgroundWriter, HostCopies, take_local
from assay.sites import CallSite, Site
from assay.trace import Trace, TraceWriter
from assay.trace.files import OutStream


def test_copies_wait_for_room_and_use_memory_again() -> None:
    copies = HostCopies(max_bytes=20_000)
    first, second = copies.copy(torch.ones(2000)), copies.copy(torch.ones(2000))
    found = []
    thread = threading.Thread(target=lambda: found.append(copies.copy(torch.zeros(2000))))
    thread.start()
    thread.join(0.1)
    assert not found
    copies.release(first)
    thread.join(10)
    assert found[0].buffer is first.buffer
    assert torch.equal(second.value, torch.ones(2000))
    assert copies.used_bytes <= 20_000


def test_a_tensor_over_the_limit_waits_for_all_others() -> None:
    copies = HostCopies(max_bytes=1000)
    large = torch.randn(5000)
    assert torch.equal(copies.copy(large).value, large)


def test_a_tensor_is_recorded_before_it_changes_in_place(tmp_path: Path) -> None:
    class Adds(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x += 1
            return x

    with torch.no_grad(), capture(Adds(), tmp_path / "t") as running:
        x = torch.zeros(1000, 100)
        running.plan.model(x)
        x.zero_()
    trace = Trace.open(tmp_path / "t")
    (call,) = trace.calls
    values = {port: float(trace.tensor(call, port)[0, 0]) for port in call.ports}
    assert values == {"input.x": 0.0, "changed.x": 1.0, "output": 1.0}


def test_the_run_does_not_wait_for_a_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = OutStream.write_at

    def write_slowly(*arguments: Any) -> None:
        time.sleep(0.05)
        write(*arguments)

    monkeypatch.setattr(OutStream, "write_at", write_slowly)
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    with torch.no_grad(), capture(net, tmp_path / "t"):
        start = time.monotonic()
        net(torch.ones(2, 8))
        waited = time.monotonic() - start
    assert waited < 0.5 < time.monotonic() - start
    assert Trace.open(tmp_path / "t").complete


def test_a_full_disk_ends_the_capture_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    net = nn.Linear(8, 8)
    is_full = threading.Event()
    write = os.pwrite

    def write_until_full(*arguments: Any) -> int:
        if is_full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr("os.pwrite", write_until_full)
    with torch.no_grad(), capture(net, tmp_path / "t"):
        net(torch.ones(2, 8))
        net(torch.zeros(2, 8))
        while (tmp_path / "t" / "index.jsonl").read_text().count("\n") < 2:
            time.sleep(0.01)
        is_full.set()
        for number in range(2, 5):
            net(torch.full((2, 8), float(number)))
    trace = Trace.open(tmp_path / "t")
    assert not trace.complete
    assert {call.site.step for call in trace.calls} == {0, 1}
    message = capsys.readouterr().err
    assert message.count("assay: capture ended, and the run goes on: cannot write") == 1
    assert "GB free there" in message


def test_left_out_sparse_tensors_are_in_the_manifest(tmp_path: Path) -> None:
    writer = BackgroundWriter(TraceWriter(tmp_path / "t", {}), 1 << 20)
    with writer:
        assert writer.keep(torch.eye(2).to_sparse()).stored is None
        writer.wait()
    assert "torch.sparse_coo" in str(Trace.open(tmp_path / "t").manifest["left_out"])


def test_any_error_in_the_background_leaves_the_trace_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dead thread would block the run, or leave a trace that claims to be complete."""

    def fail(*_: object) -> None:
        raise RuntimeError("no such kernel")

    net = nn.Linear(8, 8)
    with torch.no_grad(), capture(net, tmp_path / "t"):
        net(torch.ones(2, 8))
        monkeypatch.setattr(TraceWriter, "store", fail)
        for _ in range(3):
            net(torch.rand(2, 8))
    assert not Trace.open(tmp_path / "t").complete
    assert "the run goes on: no such kernel" in capsys.readouterr().err


RANK = 2
WHOLE = torch.arange(64.0).reshape(8, 8)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("placements", "layout"),
    [
        ((Replicate(), Replicate()), "d0 d1"),
        ((Shard(0), Replicate()), "d0[dp] d1"),
        ((Shard(0), Shard(1)), "d0[dp] d1[tp]"),
        ((Shard(0), Shard(0)), "d0[dp,tp] d1"),
        ((_StridedShard(0, split_factor=2), Shard(0)), "d0[tp,dp] d1"),
    ],
)
def test_a_layout_places_the_part_of_a_rank(
    mesh: DeviceMesh, placements: tuple[Placement, ...], layout: str
) -> None:
    part = take_local(distribute_tensor(WHOLE, mesh, placements, src_data_rank=None))

    assert part.layout == layout
    assert part.axes == {"dp": (1, 2), "tp": (0, 2)}
    shape = tuple(part.value.shape)
    ranks = [
        DumpedTensor(
            Site(CallSite(0, "", rank=rank), "output"),
            "",
            layout=layout,
            axes={"dp": (rank // 2, 2), "tp": (rank % 2, 2)},
        )
        for rank in range(4)
    ]
    placed = place_declared(ranks, [shape] * 4)
    assert placed is not None
    assert torch.equal(placed.slices[RANK].cut(WHOLE), part.value)


@pytest.mark.parametrize(
    ("placements", "layout"),
    [
        ((Replicate(), Partial()), "d0 d1[tp:partial]"),
        ((Shard(1), Partial()), "d0 d1[dp,tp:partial]"),
        # Two halves of a fused weight, each divided: no single range of rows.
        ((Replicate(), _StridedShard(0, split_factor=2)), ""),
    ],
)
def test_a_sum_has_a_layout_and_a_divided_pair_has_none(
    mesh: DeviceMesh, placements: tuple[Placement, ...], layout: str
) -> None:
    part = take_local(DTensor.from_local(WHOLE, mesh, placements, run_check=False))

    assert (part.layout, part.is_whole, part.problem) == (layout, False, "")


def test_a_mean_over_ranks_is_left_out(mesh: DeviceMesh) -> None:
    placements = (Replicate(), Partial("avg"))
    part = take_local(DTensor.from_local(WHOLE, mesh, placements, run_check=False))

    assert part.problem == "DTensors whose parts do not add up: P(avg)"


def test_axes_without_names_have_the_shape_of_their_mesh(mesh: DeviceMesh) -> None:
    unnamed = DeviceMesh("cpu", mesh.mesh)
    part = take_local(DTensor.from_local(WHOLE, unnamed, (Shard(0), Replicate())))

    assert part.layout == "d0[mesh-2x2-0] d1"
    assert part.axes == {"mesh-2x2-0": (1, 2), "mesh-2x2-1": (0, 2)}
