"""Functions for scripts: record a tensor without a module, set the requests of a pass."""

from collections.abc import Sequence

from torch import Tensor

from assay.errors import UsageError
from assay.recording.capturing.running_capture import RunningCapture
from assay.sites import RowMap

Positions = int | Sequence[int] | Tensor

RUNNING: list[RunningCapture] = []


def record(
    name: str,
    tensor: Tensor,
    dims: str = "",
    *,
    request: int | Sequence[int] | None = None,
    positions: Positions | Sequence[Positions] = (),
) -> None:
    """Record a tensor that no module returns, in every running capture.

    The tensor belongs to the current forward pass, or to the current step outside of one.

    name: takes the place of a module path in `assay compare`.
    dims: a word for each dim, such as "b s h[tp]": h is divided over the ranks of tp.
    request, positions: as in `rows`. Inside of a forward pass, those of the pass by default.
    Raises: UsageError if the number of words in `dims` differs from the number of dims, or the
        number of positions from that of requests.

    >>> assay.capture.record("rotary", cos, "s h", positions=range(8))  # doctest: +SKIP
    """
    if dims and len(dims.partition("#")[0].split()) != tensor.ndim:
        raise UsageError(
            f"dims={dims!r} of {name} has to have a word for each of {tensor.ndim} dims"
        )
    of_tensor = make_rows(0 if request is None else request, positions) if positions else None
    for running in RUNNING:
        running.record(name, tensor, dims, of_tensor)


def rows(requests: int | Sequence[int], positions: Positions | Sequence[Positions]) -> None:
    """Set the rows of the next forward pass, which servers with continuous batching reorder.

    requests: the request number of each row. In tensors of (tokens, channels), a row is a token.
    positions: for each row the position of its token, or of its tokens, in the request; -1 for padding.
    Raises: UsageError if the number of positions differs from the number of requests.

    >>> assay.capture.rows([7, 7, 7, 9], [0, 1, 2, 40])  # doctest: +SKIP
    """
    of_pass = make_rows(requests, positions)
    for running in RUNNING:
        running.tracer.next_rows = of_pass


def make_rows(requests: int | Sequence[int], positions: Positions | Sequence[Positions]) -> RowMap:
    """Return the row map of the arguments of `rows`."""
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
