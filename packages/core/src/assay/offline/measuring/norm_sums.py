"""Sums for a judgment without a noise dump.

Shape legend: R rows (tokens), C channels (last dim).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from threading import get_ident

import torch
from torch import Tensor

from assay.blocks import BLOCK_BYTES, USUAL_SIZE, WorstElement, list_blocks, map_on_threads
from assay.metrics import PairSums, RowErrors, ShapeMismatchError

# Blocks per task of a thread. Results do not depend on the number of threads.
_SPAN_BLOCKS = 16


@dataclass(slots=True)
class NormSums(PairSums):
    """Norms of tensors and rows, and the worst element. Other sums stay empty.

    Ten times as fast as `PairSums`: norms are computed in float32, unless float32 would overflow, underflow
    or hide a NaN, or a side is float64.
    """

    def add(self, actual_RC: Tensor, expected_RC: Tensor, prompt: Tensor, position: Tensor) -> None:
        """Add one call; see `PairSums.add`."""
        if actual_RC.shape != expected_RC.shape:
            raise ShapeMismatchError.of(actual_RC, expected_RC)
        found = _sum_rows(actual_RC, expected_RC) if actual_RC.numel() else None
        if found is None:
            PairSums.add(self, actual_RC, expected_RC, prompt, position)
            return
        error, expected, worst = found
        self.num_calls += 1
        self.num_elements += actual_RC.numel()
        self.dd += float(error.square().sum())
        self.ee += float(expected.square().sum())
        if worst.difference > self.worst.difference:
            row, channel = worst.index
            self.worst = replace(worst, index=(int(prompt[row]), int(position[row]), channel))
        scale = math.sqrt(float(expected.square().mean()))
        self.rows.append(
            RowErrors(prompt, position, error, expected, torch.full_like(expected, scale))
        )


def _sum_rows(actual: Tensor, expected: Tensor) -> tuple[Tensor, Tensor, WorstElement] | None:
    """Return error norm and expected norm of each row, (R,) float64, and the worst element.

    Returns: None if float32 cannot hold the norms.
    """
    if not (actual.is_floating_point() and expected.is_floating_point()):
        return None
    dtype = torch.promote_types(torch.promote_types(actual.dtype, expected.dtype), torch.float32)
    blocks = list(list_blocks(actual.shape, dtype.itemsize))
    spans = [blocks[start : start + _SPAN_BLOCKS] for start in range(0, len(blocks), _SPAN_BLOCKS)]
    norms = torch.zeros(2, len(actual), dtype=dtype)
    worst, has_values = WorstElement(), False
    for span in map_on_threads(partial(_sum_blocks, actual, expected, dtype), spans):
        torch.hypot(norms[:, span.rows], span.norms, out=norms[:, span.rows])
        worst = max(worst, span.worst, key=lambda one: one.difference)
        has_values = has_values or span.has_values
    is_small = float(norms[1].max()) < USUAL_SIZE[0] and has_values
    if is_small or not bool(norms.isfinite().all()):
        return None
    error, expected_norm = norms.double()
    return error, expected_norm, worst


@dataclass(frozen=True, slots=True)
class _SpanSums:
    """The sums of consecutive blocks."""

    rows: slice
    norms: Tensor
    """Norms of error and expected, (2, R)."""
    worst: WorstElement
    has_values: bool


def _sum_blocks(
    actual: Tensor, expected: Tensor, dtype: torch.dtype, blocks: Sequence[tuple[slice, slice]]
) -> _SpanSums:
    first = blocks[0][0].start
    norms = torch.zeros(2, min(blocks[-1][0].stop, len(actual)) - first, dtype=dtype)
    worst, has_values = WorstElement(), False
    buffers = _make_buffers(dtype, get_ident())
    for rows, columns in blocks:
        a, e = (
            part if part.dtype is dtype else _view(buffer, part.shape).copy_(part)
            for part, buffer in zip(
                (actual[rows, columns], expected[rows, columns]), buffers, strict=True
            )
        )
        has_values = has_values or any(
            float(one) != 0 for side in (a, e) for one in torch.aminmax(side)
        )
        d = torch.sub(a, e, out=_view(buffers[0], e.shape))
        own = norms[:, rows.start - first : rows.stop - first]
        for norm, part in zip(own, (d, e), strict=True):
            torch.hypot(norm, torch.linalg.vector_norm(part, dim=1), out=norm)
        low, high = torch.aminmax(d)
        largest = max(-float(low), float(high))
        if largest > worst.difference:
            row = int(d.abs().amax(1).argmax())
            column = int(d[row].abs().argmax())
            at = rows.start + row, columns.start + column
            worst = WorstElement(largest, float(actual[at]), float(e[row, column]), at)
    return _SpanSums(slice(first, first + norms.shape[1]), norms, worst, has_values)


def _view(buffer: Tensor, shape: Sequence[int]) -> Tensor:
    return buffer[: math.prod(shape)].view(shape)


@cache
def _make_buffers(dtype: torch.dtype, thread: int) -> tuple[Tensor, Tensor]:
    """Return two buffers for all calls in a thread: new buffers would fragment the memory."""
    del thread
    actual, expected = torch.empty(2, BLOCK_BYTES // dtype.itemsize, dtype=dtype)
    return actual, expected
