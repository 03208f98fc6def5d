"""Identifies the micro-batches that a trainer runs, by their content.

Shape legend: B rows, T tokens.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from assay.hooks.row_positions import BatchPositions
from assay.locating.trace_views import PackedBatch, Segment
from assay.stages import Stage
from assay.training.batches import IGNORED
from assay.training.protocol import MicroBatch
from assay.training.replay.step_values import RunRows, StepValueHandler, ValueAddress

# Number of a micro-batch, number of its row, the row's token ids without padding, their first column.
_Row = tuple[int, int, Tensor, int]


def find_micro_batch(
    batch: Mapping[str, Tensor],
    known: Sequence[MicroBatch],
    done: Collection[int],
    order: Literal["as given", "any"],
) -> int | PackedBatch:
    """Find the micro-batch of a step that `batch` equals, or those packed into it.

    A batch with other content counts as the next micro-batch, with wrong inputs.

    done: numbers of micro-batches that have run.
    order: the order in which this process runs them.
    """
    ids_BT = batch["input_ids"].cpu()
    for number, one in enumerate(known):
        if number not in done and torch.equal(one["input_ids"], ids_BT):
            return number if order == "any" else len(done)
    return find_packing(batch, known, done) or len(done)


def timeline_of(
    batch: Mapping[str, Tensor], own: int | PackedBatch, rows: RunRows, step: int
) -> BatchPositions:
    """Map the tokens of `batch` to rows of the run and positions in them."""
    ids = batch["input_ids"]
    if not isinstance(own, PackedBatch):
        single = BatchPositions.of_call(ids, batch.get("attention_mask"))
        return BatchPositions(rows.of_micro_batch(step, own, len(ids)), single.positions)
    numbers, positions = [-1] * own.num_rows, torch.full(ids.shape, -1)
    for segment in own.segments:
        row = rows.of_micro_batch(step, segment.micro_batch, segment.row + 1)[segment.row]
        if numbers[segment.at_row] < 0:
            numbers[segment.at_row] = row
        positions[segment.at_row, segment.columns] = torch.arange(segment.length)
    return BatchPositions(tuple(numbers), positions)


def observe_labels(
    handler: StepValueHandler,
    batch: Mapping[str, Tensor],
    own: int | PackedBatch,
    known: Sequence[MicroBatch],
) -> None:
    """Pass the labels of `batch` to the handler, for packed micro-batches one by one.

    The first label of each row has no effect and counts as masked.
    """
    labels = batch.get("labels")
    if labels is None:
        return
    labels = labels.clone()
    labels[:, 0] = IGNORED
    packed = unpacked_labels(labels, own, known) if isinstance(own, PackedBatch) else None
    number = own.number if isinstance(own, PackedBatch) else own
    for index, value in (packed or {number: labels}).items():
        handler.observe(ValueAddress(Stage("", "inputs"), "labels", index), value)


def observe_loss(
    handler: StepValueHandler, numbers: Sequence[int], loss: Tensor, scale: float
) -> None:
    """Pass the loss of one micro-batch, or the sum of several, to the handler without its scale."""
    dtype = str(loss.dtype).removeprefix("torch.")
    stage = Stage("", "forward")
    addresses = [ValueAddress(stage, "loss", number, dtype=dtype) for number in numbers]
    value = loss if scale == 1 else loss.double() / scale
    if len(addresses) == 1:
        handler.observe(addresses[0], value)
    else:
        handler.observe_sum(addresses, value)


def find_packing(
    batch: Mapping[str, Tensor], known: Sequence[MicroBatch], done: Collection[int]
) -> PackedBatch | None:
    """Find how `batch` is composed of whole micro-batches; None if it is not.

    Each row consists of one or several of their rows, end to end, with or without padding around.
    """
    left: list[_Row] = [
        (number, row, one["input_ids"][row][mask_T != 0], int(mask_T.argmax()))
        for number, one in enumerate(known)
        if number not in done
        for row, mask_T in enumerate(one["attention_mask"])
    ]
    # Of rows with a common beginning, match the longest.
    left.sort(key=lambda item: -len(item[2]))
    ids_BT = batch["input_ids"].cpu()
    bounds_B = _bounds(batch, ids_BT)
    segments: list[Segment] = []
    for at_row, (ids_T, (begin, end)) in enumerate(zip(ids_BT, bounds_B, strict=True)):
        column = begin
        while column < end:
            rest_T = ids_T[column:end]
            matches = (item for item in left if torch.equal(item[2], rest_T[: len(item[2])]))
            if (found := next(matches, None)) is None:
                return None
            left = [item for item in left if item is not found]
            number, row, tokens, start = found
            segments.append(Segment(number, row, len(tokens), at_row, column, start))
            column += len(tokens)
    packing = PackedBatch(tuple(segments), *ids_BT.shape)
    of_rest = {number for number, *_ in left}
    if not segments or of_rest & set(packing.micro_batches):
        return None
    return packing


def unpacked_labels(
    labels_BT: Tensor, packing: PackedBatch, known: Sequence[MicroBatch]
) -> dict[int, Tensor] | None:
    """Return the labels of each micro-batch in its own shape; None if padding has labels."""
    labels_BT = labels_BT.cpu()
    rest_BT = labels_BT.clone()
    found = {
        number: torch.full_like(known[number]["labels"], IGNORED)
        for number in packing.micro_batches
    }
    for segment in packing.segments:
        own = labels_BT[segment.at_row, segment.columns]
        found[segment.micro_batch][segment.row, segment.recorded_columns] = own
        rest_BT[segment.at_row, segment.columns] = IGNORED
    return None if bool((rest_BT != IGNORED).any()) else found


def _bounds(batch: Mapping[str, Tensor], ids_BT: Tensor) -> list[tuple[int, int]]:
    """Return the first and end column of the tokens of each row, without padding around them."""
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.shape != ids_BT.shape:
        return [(0, ids_BT.shape[1])] * len(ids_BT)
    tokens_B = [row.nonzero()[:, 0].tolist() for row in mask.cpu()]
    return [(columns[0], columns[-1] + 1) if columns else (0, 0) for columns in tokens_B]
