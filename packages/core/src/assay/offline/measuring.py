"""Measuring all pairs of two dumps: sums over every port, pooled over its passes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from assay.comparing.results import PortResult, ReplayResults
from assay.dumps.protocol import Dump, DumpedTensor
from assay.hooks.timeline import RowIndex
from assay.locating.matching.masks import count_differences, is_attention_mask
from assay.locating.measuring import measure
from assay.offline.matching import Lane, Matching, Port
from assay.offline.tokens import TokenAlignment
from assay.progress import subtask
from assay.sites import Phase, RowMap
from assay.stages import Stage


@dataclass(slots=True)
class Measured:
    """What the comparison of two dumps measured.

    results: by phase, in the order of the expected dump.
    """

    results: dict[Phase, ReplayResults] = field(default_factory=dict)
    compared: int = 0
    unpaired: list[str] = field(default_factory=list)
    """Tensors whose partner is missing in some passes, or has another shape."""

    def at(self, port: Port) -> PortResult | None:
        """Return the sums of a port, None if nothing was measured there."""
        results = self.results.get(port.phase)
        return results.ports.get((port.module, port.name)) if results else None


def measure_pairs(
    expected: Dump,
    actual: Dump,
    matching: Matching,
    alignment: TokenAlignment,
    excluded: Mapping[tuple[int, int], Tensor],
) -> Measured:
    """Measure every pair of tensors.

    excluded: by batch and step of the expected pass, the batch rows that are not comparable, (B,) bool.
    """
    measured = Measured()
    total = sum(len(lane.tensors) for lane, _ in matching.pairs)
    with subtask("compares", total, "tensors") as task:
        for lane, partner in matching.pairs:
            _measure_lane(measured, expected, actual, lane, partner, alignment, excluded)
            task.advance(len(lane.tensors))
    for lane in matching.absent_masks:
        _measure_absent_mask(measured, expected, lane, alignment)
    for results in measured.results.values():
        results.flush()
    return measured


def _measure_lane(
    measured: Measured, expected: Dump, actual: Dump, lane: Lane, partner: Lane,
    alignment: TokenAlignment, excluded: Mapping[tuple[int, int], Tensor],
) -> None:  # fmt: skip
    port = lane.port
    tensors = lane.tensors if port.direction != "parameter" else _distinct_weights(lane)
    results = measured.results.setdefault(port.phase, ReplayResults())
    for (batch, step, call), tensor in tensors.items():
        pair = alignment.pair_of(batch, step)
        if pair is None and port.direction != "parameter":
            continue  # the whole pass is reported as missing
        other_key = (pair.actual.batch, pair.actual.step, call) if pair else (batch, step, call)
        other = partner.tensors.get(other_key)
        if other is None:
            measured.unpaired.append(f"{port} at step {step}")
            continue
        if not (tensor.has_values and other.has_values):
            continue
        value, reference = actual.read(other), expected.read(tensor)
        rows = pair.expected.rows if pair and port.direction != "parameter" else None
        if is_attention_mask(port.name, reference) and is_attention_mask(port.name, value):
            _measure_mask(results, port, lane.class_name, value, reference, rows)
            measured.compared += 1
            continue
        if value.shape != reference.shape:
            shaped = _give_same_shape(value, reference)
            if shaped is None:
                shapes = f"{list(value.shape)}, expected {list(reference.shape)}"
                measured.unpaired.append(f"{port} at step {step}: its shape is {shapes}")
                continue
            value, reference = shaped
        dtype = str(value.dtype).removeprefix("torch.")
        stage = Stage(port.module, port.phase)
        result = results.at(port.module, port.name, stage, dtype, lane.class_name)
        if port.direction == "parameter" and port.phase == "forward":
            _measure_parameter(result, value, reference)
        else:
            value, reference = _give_comparable_dtype(value, reference)
            measure(result, RowIndex(rows), rows, excluded.get((batch, step)), value, reference)
        measured.compared += 1


def _measure_mask(
    results: ReplayResults, port: Port, kind: str, value: Tensor, reference: Tensor,
    rows: RowMap | None,
) -> None:  # fmt: skip
    """Count the differences of two masks in what they allow; their forms may differ."""
    result = results.at(port.module, port.name, Stage(port.module, port.phase), "bool", kind)
    if value.shape[-2:] == reference.shape[-2:]:
        result.exact.add(*count_differences(value, reference, rows))
    else:
        result.exact.add(reference.numel(), reference.numel())


def _measure_absent_mask(
    measured: Measured, expected: Dump, lane: Lane, alignment: TokenAlignment
) -> None:
    """Compare a mask with the causal one, which attention applies if it is given none."""
    port = lane.port
    results = measured.results.setdefault(port.phase, ReplayResults())
    for (batch, step, _), tensor in lane.tensors.items():
        pair = alignment.pair_of(batch, step)
        if pair is None or not tensor.has_values:
            continue
        reference = expected.read(tensor)
        if is_attention_mask(port.name, reference):
            result = results.at(
                port.module, port.name, Stage(port.module, port.phase), "bool", lane.class_name
            )
            result.exact.add(*count_differences(None, reference, pair.expected.rows))


def _distinct_weights(lane: Lane) -> dict[tuple[int, int, int], DumpedTensor]:
    """Return the first tensor of each step. Tools write a parameter once for every call."""
    first: dict[int, tuple[int, int, int]] = {}
    for key, tensor in lane.tensors.items():
        # A generation changes no weight, and its steps are forward passes.
        first.setdefault(key[1] if tensor.site.at.phase == "backward" else 0, key)
    return {key: lane.tensors[key] for key in first.values()}


def _measure_parameter(result: PortResult, value: Tensor, reference: Tensor) -> None:
    """Add a parameter, which must be equal. Where the dtypes differ, the wider is rounded first.

    The position of the worst element is its row.
    """
    if value.dtype != reference.dtype:
        coarser = min(value.dtype, reference.dtype, key=lambda dtype: (dtype.itemsize, str(dtype)))
        value, reference = value.to(coarser), reference.to(coarser)
    width = reference.shape[-1] if reference.ndim > 1 else 1
    value, reference = value.reshape(-1, width), reference.reshape(-1, width)
    same = (value == reference) | (value.isnan() & reference.isnan())
    result.exact.add(same.numel(), same.numel() - int(same.count_nonzero()))
    if not reference.is_floating_point():
        value, reference = value.double(), reference.double()
    row = torch.arange(len(reference))
    result.sums.add(value, reference, torch.full_like(row, -1), row)


def _give_same_shape(value: Tensor, reference: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return both in one shape, if they differ only in how rows are written; else None."""
    if value.numel() == reference.numel() and value.shape[-1:] == reference.shape[-1:]:
        return value.reshape(reference.shape), reference
    if 1 in (*value.shape[:1], *reference.shape[:1]):
        try:
            value, reference = torch.broadcast_tensors(value, reference)
        except RuntimeError:
            return None
        return value, reference
    return None


def _give_comparable_dtype(value: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Return actual in its own dtype and expected in the wider of the two."""
    if reference.is_floating_point() != value.is_floating_point():
        return value.double(), reference.double()
    if reference.is_floating_point():
        return value, reference.to(torch.promote_types(value.dtype, reference.dtype))
    return value, reference
