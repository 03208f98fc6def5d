"""One row of a batch."""

import pytest
import torch

from assay.locating.matching.running_parts import BatchSource
from assay.sites import RowMap

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
