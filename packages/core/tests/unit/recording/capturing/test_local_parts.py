"""Layouts of DTensors, on one of four ranks that do not communicate."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
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

from assay.dumps.protocol import DumpedTensor
from assay.offline.layouts.placements import place_declared
from assay.recording.capturing.local_parts import take_local
from assay.sites import CallSite, Site

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
