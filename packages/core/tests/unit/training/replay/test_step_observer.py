"""Micro-batches are recognised by their content, alone and packed into one."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from assay.replay.trace_views import PackedBatch, Segment
from assay.training.protocol import MicroBatch
from assay.training.replay.step_observer import find_micro_batch, timeline_of, unpacked_labels
from assay.training.replay.step_values import RunRows


def batch(*rows: Sequence[int], length: int | None = None, masked: bool = True) -> MicroBatch:
    """Rows of ids, padded on the right with 0; their labels are the ids but for the first."""
    length = length or max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    labels = torch.where(mask == 1, ids, -100)
    labels[:, 0] = -100
    made = {"input_ids": ids, "labels": labels}
    return made | {"attention_mask": mask} if masked else made


# The first row begins as the third does.
KNOWN = [batch([5, 6, 7], [8, 9]), batch([5, 6, 7, 4])]
STACKED = PackedBatch(
    (Segment(0, 0, 3, 0, 0), Segment(0, 1, 2, 1, 0), Segment(1, 0, 4, 2, 0)), 3, 4
)
END_TO_END = PackedBatch(
    (Segment(1, 0, 4, 0, 0), Segment(0, 1, 2, 0, 4), Segment(0, 0, 3, 0, 6)), 1, 9
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (KNOWN[0], 0),
        (batch([5, 6, 7], [8, 9], [5, 6, 7, 4]), STACKED),
        (batch([5, 6, 7, 4, 8, 9, 5, 6, 7], masked=False), END_TO_END),
        (batch([5, 6, 7], [8, 9], length=8), PackedBatch(STACKED.segments[:2], 2, 8)),
        (
            batch([8, 9], [5, 6, 7]),
            PackedBatch((Segment(0, 1, 2, 0, 0), Segment(0, 0, 3, 1, 0)), 2, 3),
        ),
    ],
    ids=["as it is", "stacked", "end to end", "padded further", "rows exchanged"],
)
def test_whole_micro_batches_are_recognised(given: MicroBatch, expected: int | PackedBatch) -> None:
    assert find_micro_batch(given, KNOWN, (), "as given") == expected


@pytest.mark.parametrize(
    "given",
    [
        batch([5, 6, 7], [8, 9], [5, 6, 7]),  # a row twice, and another one cut off
        batch([5, 6, 7]),  # half of a micro-batch
        batch([5, 6, 7], [8, 9], [5, 6, 7, 3]),
        batch([5, 6, 7, 0], [8, 9], masked=False),  # padding that is not masked
        KNOWN[1],  # in another order
    ],
)
def test_anything_else_is_taken_for_the_next_micro_batch(given: MicroBatch) -> None:
    assert find_micro_batch(given, KNOWN, (), "as given") == 0


def test_ranks_take_their_micro_batches_in_any_order_and_each_once() -> None:
    assert find_micro_batch(KNOWN[1], KNOWN, (), "any") == 1
    assert find_micro_batch(KNOWN[1], KNOWN, (1,), "any") == 1  # the next one: it has run already
    assert find_micro_batch(KNOWN[0], KNOWN, (0,), "any") == 1


def labels_of(given: MicroBatch, packing: PackedBatch) -> dict[int, Tensor] | None:
    return unpacked_labels(given["labels"], packing, KNOWN)


@pytest.mark.parametrize(
    ("given", "packing"),
    [
        (batch([5, 6, 7], [8, 9], [5, 6, 7, 4]), STACKED),
        (batch([5, 6, 7, 4, 8, 9, 5, 6, 7], masked=False), END_TO_END),
    ],
)
def test_labels_go_back_to_their_micro_batches(given: MicroBatch, packing: PackedBatch) -> None:
    given["labels"][0, [segment.at_column for segment in packing.segments]] = -100

    found = labels_of(given, packing)

    assert found is not None
    assert all(torch.equal(found[number], KNOWN[number]["labels"]) for number in (0, 1))


def test_label_in_padding_belongs_to_no_micro_batch() -> None:
    given = batch([5, 6, 7], [8, 9], [5, 6, 7, 4])
    given["labels"][1, 3] = 7

    assert labels_of(given, STACKED) is None


def test_tokens_keep_the_row_and_the_position_that_they_have_in_the_run() -> None:
    rows = RunRows.of_counts([[2, 1], [2, 1]])
    given = batch([5, 6, 7, 4, 8, 9, 5, 6, 7], masked=False)

    stacked = timeline_of(batch([5, 6, 7], [8, 9], [5, 6, 7, 4]), STACKED, rows, step=1)
    assert stacked.prompts == (3, 4, 5)
    assert stacked.positions.tolist() == [[0, 1, 2, -1], [0, 1, -1, -1], [0, 1, 2, 3]]

    end_to_end = timeline_of(given, END_TO_END, rows, step=1)
    assert end_to_end.prompts == (5,)
    assert end_to_end.positions.tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 2]]
