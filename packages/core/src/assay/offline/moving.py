"""New addresses for the tensors of a dump."""

from collections.abc import Iterable
from dataclasses import replace

from assay.dumps.protocol import Dump, DumpedTensor
from assay.sites import Site


def move_tensor(tensor: DumpedTensor, **changes: object) -> DumpedTensor:
    """Return a tensor with changed fields of its `CallSite`."""
    at = replace(tensor.site.at, **changes)  # type: ignore[arg-type]  # fields of CallSite
    return replace(tensor, site=Site(at, tensor.site.port))


def move_all(dump: Dump, moves: Iterable[tuple[DumpedTensor, DumpedTensor]]) -> Dump:
    """Return a dump with the first tensor of each pair replaced by the second. Rows move along."""
    moves = list(moves)
    rows = {new.site.at: dump.rows[old.site.at] for old, new in moves if old.site.at in dump.rows}
    return replace(dump, tensors=[new for _, new in moves], rows=rows)
