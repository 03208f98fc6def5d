"""Matching of the ports of a running call with the recorded ones: names, masks, and parts of tensors.

A process may run some rows of a recorded batch, or the shard of a rank. Attention masks are compared by the
pairs that they allow, in any form.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from assay.hooks.row_positions import RowLayout
from assay.hooks.tensors import iterate_leaves, iterate_tensors
from assay.sites import LocalPart, RowMap

# Argument names with one meaning in all Hugging Face models.
_STANDARD = frozenset(
    {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "cache_position"}
)
PADDING_MASK = "attention_mask"


def recorded_names(arguments: Mapping[str, Any], ports: tuple[str, ...]) -> dict[str, str]:
    """Map each argument to its name in the trace, which may differ between classes."""
    recorded = _names_of(ports)
    names = {name: name for name in arguments}
    ours = [
        name
        for name, value in arguments.items()
        if name not in recorded and name not in _STANDARD and iterate_tensors(value, name)
    ]
    if not ours:
        return names
    theirs = [name for name in recorded if name not in arguments and name not in _STANDARD]
    if len(ours) == len(theirs):
        names.update(zip(ours, theirs, strict=True))
    return names


@lru_cache(maxsize=4096)
def _names_of(ports: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the arguments among `ports`."""
    return tuple(dict.fromkeys(port.split(".")[1] for port in ports if _is_input(port)))


def missing_ports(
    ports: tuple[str, ...], seen: AbstractSet[str], arguments: Mapping[str, Any], output: object
) -> list[str]:
    """Return the recorded `ports` that are missing in a call.

    seen: the ports that it has. An optional argument or result that is None is not missing.
    """
    absent = set(ports) - seen
    if not absent:
        return []
    given = {f"input.{name}" for name in recorded_names(arguments, ports).values()}
    offered_none = {
        port
        for name, value in [*arguments.items(), ("", output)]
        for port, leaf in iterate_leaves(value, f"input.{name}" if name else "output")
        if leaf is None
    } | {port for port in absent if _is_input(port) and ".".join(port.split(".")[:2]) not in given}
    return sorted(absent - offered_none)


def ancestors(module: str) -> list[str]:
    """Return the paths of the modules around `module`, the model itself ("") first."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(len(parts))] if module else []


def _is_input(port: str) -> bool:
    return port.startswith("input.")


# Axes of a mask of pairs without heads: batch, queries, keys.
_PAIRS_NDIM = 3

# Attention implementations whose masks are complete. Others (flash, flex) get padding and window by
# other arguments; their masks are neither compared nor replaced, and the result of attention is judged.
COMPARABLE_IMPLEMENTATIONS = frozenset({"eager", "sdpa"})


def is_attention_mask(port: str, expected: Tensor) -> bool:
    """Return True if the tensor at `port` only states which keys each query may see.

    Its last axes are queries and keys; before them may be heads, or streams of one text. An additive mask
    contains lowest numbers and one other number only, mostly 0; biases by distance are values.
    """
    if not _is_named_mask(port) or expected.ndim < _PAIRS_NDIM:
        return False
    if not expected.is_floating_point():
        return True
    allowed_BxTS = allowed(expected)
    least, most = (expected.where(allowed_BxTS, bound) for bound in (math.inf, -math.inf))
    # Without a lowest number, ones are a mask to multiply with.
    only = expected.new_zeros(()) if bool(allowed_BxTS.all()) else most.amax()
    return bool(least.amin() >= only >= most.amax())


def is_unnamed_mask(value: Tensor) -> bool:
    """Return True if the values are those of an attention mask, (B, 1, T, S), under any port name."""
    if value.ndim != 4 or value.shape[1] != 1:
        return False
    if value.dtype is torch.bool:
        return True
    return (
        value.is_floating_point()
        and bool((value != 0).any())
        and bool(((value == 0) | ~allowed(value)).all())
    )


def is_padding_mask(port: str, expected: Tensor) -> bool:
    """Return True for a mask of padding keys, (B, S), of zeros and ones."""
    return _is_of_keys(port, expected) and bool(((expected == 0) | (expected == 1)).all())


def is_any_mask(port: str, expected: Tensor) -> bool:
    """Return True for an attention mask, or a mask of padding keys, (B, S), also with numbers of packed rows."""
    return _is_of_keys(port, expected) or is_attention_mask(port, expected)


def _is_of_keys(port: str, expected: Tensor) -> bool:
    return _is_named_mask(port) and expected.ndim == 2 and not expected.is_floating_point()


def find_trailing(rows: RowMap | None, shape: tuple[int, ...]) -> Tensor:
    """Mark the padding after the last token of each row, (B, S), which causal attention never reads.

    Returns: all False if `rows` are unknown or have another shape.
    """
    if rows is None or (rows.num_rows, rows.length) != shape:
        return torch.zeros(shape, dtype=torch.bool)
    is_token_BS = torch.tensor(rows.positions) >= 0
    return is_token_BS.flip(-1).cumsum(-1).flip(-1) == 0


def is_mask_of_pairs_for_padding(port: str, actual: Tensor, expected: tuple[int, ...]) -> bool:
    """Return True if a trainer passes a mask of pairs, (B, 1, T, S), instead of the padding, (B, S).

    expected: the shape in the reference.
    Such a mask is judged at attention, by the mask there or by the result.
    """
    return _is_named_mask(port) and len(expected) == 2 and actual.ndim == 4


@lru_cache(maxsize=4096)
def _is_named_mask(port: str) -> bool:
    """Return True if a port is named a mask, or is in a dict of masks by kind of attention."""
    return any(part.endswith("mask") for part in port.split(".")[-2:])


def allowed(mask: Tensor) -> Tensor:
    """Return the columns that each row of an additive or boolean mask allows."""
    if mask.dtype is torch.bool:
        return mask
    if not mask.is_floating_point():
        return mask != 0
    columns = mask > torch.finfo(mask.dtype).min / 2
    # A mask that was rounded to a narrower dtype keeps the lowest number of that one.
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        columns &= mask != torch.finfo(dtype).min
    return columns


class MaskDifference(NamedTuple):
    """The comparison of two masks."""

    num_compared: int
    """(query, key) pairs; of masks of padding, keys."""
    num_different: int
    first: tuple[int, int] = (-1, -1)
    """Prompt and position of the first query whose keys differ, if its row is known."""


def count_differences(
    actual: Tensor | None, expected: Tensor, rows: RowMap | None
) -> MaskDifference:
    """Compare two masks. Rows of padding queries are ignored.

    actual: a mask, or None: see `implied_mask`.
    expected: the reference's mask, (B, T, S) or (B, ..., T, S), or (B, S) for padding.
    """
    if expected.ndim == 2:
        given = torch.ones_like(expected) if actual is None else actual
        return MaskDifference(expected.numel(), int((allowed(given) != allowed(expected)).sum()))
    expected_BxTS = allowed(expected)
    batch, *_, length, num_keys = expected_BxTS.shape
    if actual is None:
        actual_BxTS = implied_mask(expected)
    else:
        actual_BxTS = _without_empty_slots(allowed(actual.detach().cpu()), num_keys)
    valid_BT = torch.ones(batch, length, dtype=torch.bool)
    known = rows if rows is not None and (rows.num_rows, rows.length) == (batch, length) else None
    if known is not None:
        valid_BT = torch.tensor(known.positions) >= 0
    num_compared = int(valid_BT.sum()) * expected.numel() // max(1, batch * length)
    try:
        different = actual_BxTS.broadcast_to(expected_BxTS.shape) != expected_BxTS
    except RuntimeError:  # shapes differ: no pair agrees
        return MaskDifference(num_compared, num_compared)
    different = different & valid_BT.view(batch, *[1] * (expected.ndim - 3), length, 1)
    wrong_BT = different.movedim(-2, 1).flatten(2).any(-1)
    if known is None or not wrong_BT.any():
        return MaskDifference(num_compared, int(different.sum()))
    row, column = wrong_BT.nonzero()[0].tolist()
    first = known.prompts[row], known.positions[row][column]
    return MaskDifference(num_compared, int(different.sum()), first)


def implied_mask(expected: Tensor) -> Tensor:
    """Return the mask that attention without a mask has, in the shape of the reference's mask.

    It is causal. Where the reference's queries see every key, as in an encoder, it is the reference's mask: the
    result of attention shows if the candidate's attention is causal.
    """
    if bool(allowed(expected).all()):
        return allowed(expected)
    length, num_keys = expected.shape[-2:]
    causal_TS = torch.ones(length, num_keys, dtype=torch.bool).tril(num_keys - length)
    return causal_TS.expand(expected.shape)


def _without_empty_slots(allowed_BxTS: Tensor, num_keys: int) -> Tensor:
    """Drop the columns after the keys, which no query may see: slots of a static cache without a token."""
    is_empty = not allowed_BxTS[..., num_keys:].any()
    return allowed_BxTS[..., :num_keys] if is_empty else allowed_BxTS


def in_form_of(actual: Tensor, expected: Tensor) -> Tensor:
    """Convert `expected` to the kind and dtype of the mask `actual`."""
    if not actual.is_floating_point():
        return allowed(expected).to(actual.dtype)
    lowest = torch.finfo(actual.dtype).min
    return torch.zeros_like(expected, dtype=actual.dtype).masked_fill(~allowed(expected), lowest)


def mask_for(module: nn.Module, expected: Tensor) -> Tensor:
    """Convert `expected` to the dtype and device of `module`."""
    parameters = list(module.parameters())
    device = next((p.device for p in parameters), expected.device)
    dtype = next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)
    return in_form_of(torch.zeros(0, dtype=dtype), expected).to(device)


@dataclass(frozen=True, slots=True)
class BatchSource:
    """The place of the running batch in a trace."""

    batch: int
    """Number of the batch in the trace."""
    row: int | None = None
    """The only row of it that runs; None for all."""

    def select_rows(self, rows: RowMap | None) -> RowMap | None:
        """Return the row map of the running rows."""
        if self.row is None or rows is None:
            return rows
        return RowMap((rows.prompts[self.row],), (rows.positions[self.row],))

    def select(self, tensor: Tensor, rows: RowMap | None) -> Tensor:
        """Return the part of a recorded tensor that belongs to the running rows."""
        if self.row is None or rows is None:
            return tensor
        layout = RowLayout.of_shape(tensor.shape, rows)
        if layout.batch_dim is None:
            return tensor
        size = rows.length if layout.flattened else 1
        return tensor[self.row * size : (self.row + 1) * size]

    def selected_shape(self, shape: tuple[int, ...], rows: RowMap | None) -> tuple[int, ...]:
        """Return the shape of the result of `select`."""
        return tuple(self.select(torch.empty(shape, device="meta"), rows).shape)


class RankLayout(Protocol):
    """The sharding of tensors over ranks by a trainer.

    All ranks that share a tensor call each method, in the same order. A tensor of the whole shape is
    whole.
    """

    def holds_part(self, module: str, port: str, local: Tensor, shape: tuple[int, ...]) -> bool:
        """Return True if `local` can be this rank's part of a tensor of `shape`."""
        ...

    def whole(self, parts: Sequence[LocalPart]) -> list[Tensor]:
        """Return the whole tensors, assembled from the parts of all ranks in one exchange."""
        ...

    def whole_gradient(
        self, module: str, port: str, local: Tensor, shape: tuple[int, ...]
    ) -> Tensor:
        """Return the gradient of the whole tensor, the sum over ranks that hold the same part."""
        ...

    def part(self, module: str, port: str, whole: Tensor) -> Tensor:
        """Return this rank's part of `whole`."""
        ...

    def part_of_gradient(self, module: str, port: str, whole: Tensor) -> Tensor:
        """Return this rank's share of a whole gradient, the sum of all shares."""
        ...


def layout_of(
    layout: RankLayout | None, module: str, port: str, local: Tensor, shape: tuple[int, ...]
) -> RankLayout | None:
    """Return `layout` if `local` is a part of a tensor of `shape`; None if it is whole, or neither."""
    if layout is None or tuple(local.shape) == shape:
        return None
    return layout if layout.holds_part(module, port, local, shape) else None


# Elements of whole tensors that wait for one exchange.
_EXCHANGED_ELEMENTS = 1 << 18


@dataclass(slots=True)
class PartQueue:
    """Exchanges the parts of many ports at once: a decode step has many, of few elements."""

    _layout: RankLayout | None = None
    _waiting: list[tuple[LocalPart, Callable[[Tensor], None]]] = field(default_factory=list)
    _num_elements: int = 0

    def add(self, layout: RankLayout, part: LocalPart, measure: Callable[[Tensor], None]) -> None:
        """Call `measure` with the whole tensor, at the latest in `flush`.

        The part is copied. All ranks that share a tensor add the same parts in the same order.
        """
        self._layout = layout
        self._waiting.append((part._replace(local=part.local.clone()), measure))
        self._num_elements += math.prod(part.shape)
        if self._num_elements >= _EXCHANGED_ELEMENTS:
            self.flush()

    def flush(self) -> None:
        """Assemble and measure all parts that wait."""
        if self._layout is None:
            return
        layout, waiting = self._layout, self._waiting
        self._layout, self._waiting, self._num_elements = None, [], 0
        wholes = layout.whole([part for part, _ in waiting])
        for whole, (_, measure) in zip(wholes, waiting, strict=True):
            measure(whole)
