"""One row of a batch, and the parts of a rank."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.locating.matching.running_parts import BatchSource, PartQueue
from assay.sites import LocalPart, RowMap

ROWS = RowMap((3, 5), ((-1, 0, 1), (0, 1, 2)))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 3, 4), (1, 3, 4)),
        ((2, 5, 3, 4), (1, 5, 3, 4)),
        ((6, 4), (3, 4)),
        ((1, 3, 4), (1, 3, 4)),
        ((7,), (7,)),
    ],
    ids=["states", "cache", "flattened", "shared by all", "without rows"],
)
def test_single_row_selects_its_part(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    source = BatchSource(0, row=1)
    values = torch.arange(float(torch.Size(shape).numel())).reshape(shape)

    part = source.select(values, ROWS)

    assert tuple(part.shape) == expected == source.selected_shape(shape, ROWS)
    if shape != expected:
        assert torch.equal(part.reshape(-1), values.reshape(-1)[values.numel() // 2 :])
    assert source.select_rows(ROWS) == RowMap((5,), ((0, 1, 2),))


def test_whole_batch_selects_everything() -> None:
    values = torch.zeros(2, 3, 4)

    assert BatchSource(0).select(values, ROWS) is values
    assert BatchSource(0).select_rows(ROWS) is ROWS


class TwoRanks:
    """The layout of a rank whose neighbor has the negated part."""

    def __init__(self) -> None:
        self.exchanges: list[list[str]] = []

    def whole(self, parts: Sequence[LocalPart]) -> list[Tensor]:
        self.exchanges.append([part.module for part in parts])
        return [torch.cat([part.local, -part.local], -1) for part in parts]


def test_parts_of_many_ports_are_exchanged_at_once_as_they_were_when_added() -> None:
    layout: Any = TwoRanks()
    queue = PartQueue()
    measured: list[Tensor] = []
    local = torch.ones(1, 2)
    for module in ("q_proj", "k_proj"):
        queue.add(layout, LocalPart(module, "output", local, (1, 4)), measured.append)
        local += 1  # as an in-place operation of the model
    assert measured == []

    queue.flush(layout)
    queue.flush(layout)

    assert layout.exchanges == [["q_proj", "k_proj"]]
    assert [whole.tolist() for whole in measured] == [[[1, 1, -1, -1]], [[2, 2, -2, -2]]]


def test_large_parts_do_not_wait_for_others() -> None:
    layout: Any = TwoRanks()
    queue = PartQueue()
    measured: list[Tensor] = []
    for module in ("q_proj", "k_proj"):
        part = LocalPart(module, "output", torch.ones(512, 512), (512, 1024))
        queue.add(layout, part, measured.append)

    assert layout.exchanges == [["q_proj"], ["k_proj"]]
    assert len(measured) == 2
