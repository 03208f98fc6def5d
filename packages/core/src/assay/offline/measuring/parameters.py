"""Measurement of parameters, which must be equal."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from assay.comparing.results import PortResult
from assay.dumps.protocol import Dump, DumpedTensor
from assay.kernel import WorstElement
from assay.offline.layouts.shards import relative_difference
from assay.offline.measuring.shapes import coarsest_dtype
from assay.offline.ports.lanes import Lane, LanePair


def find_first_step(lanes: LanePair) -> int:
    """Return the first step in which both sides hold a parameter; 0 if there is none."""
    steps = [{step for _, step, _ in lane.tensors} for lane in (lanes.expected, lanes.actual)]
    return min(steps[0] & steps[1], default=0)


def distinct_weights(
    lane: Lane, first_step: int
) -> dict[tuple[int, int], list[list[DumpedTensor]]]:
    """Return the first tensors of each micro-batch, for every group of ranks that holds copies.

    Tools write a parameter again in every call. Weights from before `first_step` are left out.
    """
    found: dict[tuple[int, int], dict[tuple[int, ...], list[DumpedTensor]]] = {}
    for key, tensors in lane.tensors.items():
        # A generation does not change weights. In training, the weights of later steps result from updates.
        is_weight = lane.port.phase == "forward"
        if is_weight and key[1] < first_step:
            continue
        writers = tuple(one.writer for one in tensors) if is_weight else ()
        found.setdefault((0, 0) if is_weight else key[:2], {}).setdefault(writers, tensors)
    return {key: list(copies.values()) for key, copies in found.items()}


def compare_copies(dump: Dump, copies: Sequence[list[DumpedTensor]]) -> Iterator[tuple[int, float]]:
    """Yield the rank of each copy of a parameter, and its difference from the first copy."""
    for copy in copies[1:]:
        for one, first in zip(copy, copies[0], strict=False):
            if one.has_values and first.has_values and one.shape == first.shape:
                value, reference = dump.read_intact(one), dump.read_intact(first)
                error = math.inf  # the file is damaged
                if value is not None and reference is not None:
                    error = relative_difference(value, reference)
                yield one.writer, error


def measure_parameter(
    result: PortResult, value: Tensor, reference: Tensor
) -> tuple[Tensor, Tensor]:
    """Add a parameter to `result`. If the dtypes differ, the wider side is rounded first.

    The position of the worst element is its row.
    Returns: the compared rows of both, (R, C).
    """
    coarser = coarsest_dtype(value.dtype, reference.dtype)
    value, reference = value.to(coarser), reference.to(coarser)
    width = reference.shape[-1] if reference.ndim > 1 else 1
    value, reference = value.reshape(-1, width), reference.reshape(-1, width)
    same = None
    if not torch.equal(value, reference):
        same = (value == reference) | (value.isnan() & reference.isnan())
    num_different = 0 if same is None else same.numel() - int(same.count_nonzero())
    result.exact.add(value.numel(), num_different)
    if not reference.is_floating_point():
        value, reference = value.double(), reference.double()
    row = torch.arange(len(reference))
    result.sums.add(value, reference, torch.full_like(row, -1), row)
    if same is not None and (result.sums.num_nan or result.sums.num_inf):
        # The sums exclude values that are not finite. The first one is the worst element.
        wrong = (~same & ~value.isfinite()).nonzero()[:1].tolist()
        for at, channel in wrong:
            values = float(value[at, channel]), float(reference[at, channel])
            result.sums.worst = WorstElement(math.inf, *values, (-1, at, channel))
    return value, reference


# The most elements of an update whose gradient may be pure noise, and the fewest elements per such element.
_FEW_FLIPS = 3
_ELEMENTS_FOR_FLIP = 64
# A gradient of pure noise moves its parameter by up to the learning rate, in either direction. Smaller
# differences than half of that belong to all elements alike, such as those of another learning rate.
_FLIP_SIZES = (0.5, 2.0)


def excuse_sign_flips(update: Tensor, reference: Tensor) -> tuple[Tensor, int]:
    """Return `reference` with the values of `update` in the few elements that may have any sign.

    Adam divides a gradient by its size. In a small tensor, one element of random sign is 1% of the update.

    Returns: also the number of such elements.
    """
    num_flips = min(_FEW_FLIPS, update.numel() // _ELEMENTS_FOR_FLIP)
    if not num_flips or not bool(update.isfinite().all()):
        return reference, 0
    worst, index = (update - reference).abs().flatten().topk(num_flips)
    low, high = (size * reference.abs().max() for size in _FLIP_SIZES)
    index = index[(worst > low) & (worst <= high)]
    excused = reference.flatten().clone()
    excused[index] = update.flatten()[index]
    return excused.view_as(reference), len(index)
