"""Detection of context parallelism: ranks that divide the tokens of a pass."""

from collections.abc import Mapping, Sequence

from torch import arange

from assay.dumps.protocol import Dump, DumpedTensor
from assay.offline.layouts.declared_layouts import LayoutError, place_declared
from assay.offline.tokens.alignment import read_ids, read_positions
from assay.sites import RowMap

# The rows of every group of ranks, by batch and step.
PartsOfPasses = Mapping[tuple[int, int], Sequence[RowMap]]


def find_parts(dump: Dump, groups: Sequence[Sequence[int]]) -> PartsOfPasses:
    """Return the rows of each group, for passes that the groups divide.

    Returns: an empty mapping if every group has its own prompts, which begin at position 0.
    """
    passes: dict[tuple[int, int], dict[int, list[DumpedTensor]]] = {}
    for tensor in dump.tensors:
        at = tensor.site.at
        if at.phase == "forward":
            of_rank = passes.setdefault((at.micro_batch, at.step), {})
            of_rank.setdefault(at.rank, []).append(tensor)
    found = {}
    for key, of_rank in sorted(passes.items()):
        if any(members[0] not in of_rank for members in groups):
            continue
        rows = _read_rows(dump, [of_rank[members[0]] for members in groups], key[0])
        if rows is not None and len({one.positions for one in rows}) > 1:
            found[key] = rows
    first = found.get(min(passes, default=(0, 0)))
    if first is None or all(any(0 in held for held in one.positions) for one in first):
        return {}
    return found


def _read_rows(dump: Dump, parts: Sequence[list[DumpedTensor]], batch: int) -> list[RowMap] | None:
    """Return the rows of each group's first rank, as recorded or from the layout of the ids."""
    recorded = [
        next((rows for one in part if (rows := dump.rows.get(one.site.at)) is not None), None)
        for part in parts
    ]
    if all(recorded):
        return [one for one in recorded if one is not None]
    ids = [read_ids(dump, part) for part in parts]
    shapes = [(one.shape[0], one.shape[1]) for one in ids if one is not None]
    if len(shapes) < len(parts):
        return None
    known = [read_positions(dump, part, shape) for part, shape in zip(parts, shapes, strict=True)]
    positions = [one for one in known if one is not None]
    if len(positions) < len(parts):
        positions = _declared_positions(parts, shapes)
    prompts = [tuple(batch * shape[0] + row for row in range(shape[0])) for shape in shapes]
    return [
        RowMap(names, tuple(map(tuple, rows)))
        for names, rows in zip(prompts, positions, strict=False)
    ] or None


def _declared_positions(
    parts: Sequence[list[DumpedTensor]], shapes: Sequence[tuple[int, int]]
) -> list[list[list[int]]]:
    """Return the positions of each part by the declared layout of the ids; none without a layout."""
    tensors = [
        next((one for one in part if one.layout and one.site.port.endswith("ids")), None)
        for part in parts
    ]
    held = [one for one in tensors if one is not None and one.shape is not None]
    if len(held) < len(parts):
        return []
    try:
        placement = place_declared(held, [one.shape or () for one in held])
    except LayoutError:
        return []
    if placement is None:
        return []
    whole = arange(placement.shape[-1])
    return [
        [one_slice.cut(whole).tolist()] * shape[0]
        for one_slice, shape in zip(placement.slices, shapes, strict=True)
    ]
