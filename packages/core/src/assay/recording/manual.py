"""Functions by which a script records tensors without a module, and declares requests."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from assay.errors import UsageError
from assay.sites import RowMap

Positions = int | Sequence[int] | Tensor


class ManualRecorder(Protocol):
    """A running capture."""

    def record(self, name: str, tensor: Tensor, dims: str, rows: RowMap | None) -> None:
        """Record a tensor under a name."""

    def declare_rows(self, rows: RowMap) -> None:
        """Take `rows` for those of the next forward pass."""


RUNNING: list[ManualRecorder] = []


def record(
    name: str,
    tensor: Tensor,
    dims: str = "",
    *,
    request: int | Sequence[int] | None = None,
    positions: Positions | Sequence[Positions] = (),
) -> None:
    """Record a tensor that no module returns, in every running capture. Without one, do nothing.

    Inside of a forward pass it belongs to that pass, else to the current step of the capture.

    name: stands for the path of a module in `assay compare`.
    dims: a word for each dim, such as "b s h[tp]": h is divided over the ranks of tp.
    request, positions: as in `rows`. Inside of a forward pass, those of the pass by default.
    Raises: UsageError if `dims` has another number of words than the tensor has dims, or if there is
        another number of positions than of requests.

    >>> assay.capture.record("rotary", cos, "s h", positions=range(8))  # doctest: +SKIP
    """
    if dims and len(dims.partition("#")[0].split()) != tensor.ndim:
        raise UsageError(
            f"dims={dims!r} of {name} has to have a word for each of {tensor.ndim} dims"
        )
    declared = make_rows(0 if request is None else request, positions) if positions else None
    for running in RUNNING:
        running.record(name, tensor, dims, declared)


def rows(requests: int | Sequence[int], positions: Positions | Sequence[Positions]) -> None:
    """Declare the rows of the next forward pass, which servers with continuous batching reorder.

    requests: the request number of each row. For tensors of (tokens, channels), a row is a token.
    positions: for each row the position of its token in the request, or those of its tokens. -1 is padding.
    Raises: UsageError if there is another number of positions than of requests.

    >>> assay.capture.rows([7, 7, 7, 9], [0, 1, 2, 40])  # doctest: +SKIP
    """
    declared = make_rows(requests, positions)
    for running in RUNNING:
        running.declare_rows(declared)


def make_rows(requests: int | Sequence[int], positions: Positions | Sequence[Positions]) -> RowMap:
    """Return the rows of a pass, see `rows`."""
    if isinstance(requests, int):
        requests, positions = [requests], [_list(positions)]
    of_rows = [_list(one) for one in _list(positions)]
    lengths = set(map(len, of_rows))
    if len(of_rows) != len(requests) or len(lengths) > 1:
        raise UsageError(
            f"{len(requests)} requests, but positions of {len(of_rows)} rows, with"
            f" {', '.join(map(str, sorted(lengths))) or 'no'} tokens each"
        )
    return RowMap(tuple(map(int, requests)), tuple(map(tuple, of_rows)))


def _list(value: Positions | Sequence[Positions]) -> list[int]:
    if isinstance(value, Tensor):
        value = value.tolist()
    return [value] if isinstance(value, int) else list(value)  # type: ignore[arg-type]
