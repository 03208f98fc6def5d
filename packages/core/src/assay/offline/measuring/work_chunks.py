"""Division of the pairs among processes and, under torchrun, among ranks, by bytes."""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from tempfile import TemporaryFile
from typing import IO, TypeVar

import torch
import torch.distributed as dist

from assay.launch import Rank, TimeLimits, World, call, outer_world_size
from assay.launch.forked_pool import dump_mapped, load_mapped, map_forked
from assay.offline.pairing.port_series import SeriesPair
from assay.progress import Progress, subtask

T = TypeVar("T")

# Measuring this many bytes takes a tenth of a second, about as long as starting a process.
_FEWEST_BYTES = 64 << 20
# With about this many chunks, 16 cores finish nearly together.
_NUM_CHUNKS = 128

# An idle rank waits for the others.
_LONGEST = timedelta(days=7).total_seconds()


# Consecutive pairs that one process measures.
Chunk = Sequence[SeriesPair]


def map_chunks(function: Callable[[Chunk], T], chunks: Sequence[Chunk]) -> list[T]:
    """Apply `function` to every chunk on all cores. Under torchrun the ranks divide the chunks.

    Returns: the results in the order of the chunks, on every rank.
    Raises: the error of `function`, or WorldError with the rank if another rank fails.
    """
    size = outer_world_size(os.environ)
    if size is None:
        results = _map_numbered(function, chunks, range(len(chunks)))
    else:
        limits = TimeLimits(collective_seconds=_LONGEST, body_seconds=2 * _LONGEST)
        world = World({"rank": size}, threads=torch.get_num_threads(), limits=limits)
        results = {}
        call(_map_on_rank, (function, chunks, results), world=world)
    return [results[number] for number in range(len(chunks))]


def _map_on_rank(
    request: tuple[Callable[[Chunk], T], Sequence[Chunk], dict[int, T]], _: Progress, rank: Rank
) -> None:
    """Map this rank's chunks, and exchange the results with all ranks."""
    function, chunks, results = request
    numbers = _divide_by_bytes(chunks, rank.size)
    own = _map_numbered(function, chunks, numbers[rank.number])
    for source in range(rank.size):
        with TemporaryFile() as file:
            if source == rank.number:
                dump_mapped(own, file)
            _broadcast(file, source)
            results |= load_mapped(file)


def _broadcast(file: IO[bytes], source: int) -> None:
    file.seek(0)
    content = [file.read()]
    dist.broadcast_object_list(content, source)
    file.seek(0)
    file.write(content[0])
    file.flush()


def _map_numbered(
    function: Callable[[Chunk], T], chunks: Sequence[Chunk], numbers: Sequence[int]
) -> dict[int, T]:
    results: dict[int, T] = {}
    sizes = {number: _count_bytes(chunks[number]) for number in numbers}
    with subtask("compares", sum(sizes.values()), "bytes") as task:
        for place, result in map_forked(function, [chunks[number] for number in numbers]):
            results[numbers[place]] = result
            task.advance(sizes[numbers[place]])
    return results


def _divide_by_bytes(chunks: Sequence[Chunk], num_ranks: int) -> list[list[int]]:
    """Assign chunks to ranks: the largest first, each to the least loaded rank."""
    numbers: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    sizes = [_count_bytes(chunk) for chunk in chunks]
    for number in sorted(range(len(chunks)), key=lambda number: -sizes[number]):
        rank = loads.index(min(loads))
        numbers[rank].append(number)
        loads[rank] += sizes[number]
    return numbers


def divide_pairs(pairs: Sequence[SeriesPair]) -> list[Chunk]:
    """Divide pairs into consecutive chunks of about equal size.

    If two pairs have the same port, and so pool their sums, all pairs form one chunk.
    """
    if len({pair.port for pair in pairs}) < len(pairs):
        return [pairs]
    least = max(_FEWEST_BYTES, _count_bytes(pairs) // _NUM_CHUNKS)
    chunks: list[Chunk] = []
    waiting: list[SeriesPair] = []
    num_bytes = 0
    for pair in pairs:
        waiting.append(pair)
        num_bytes += _count_bytes([pair])
        if num_bytes >= least:
            chunks.append(waiting)
            waiting, num_bytes = [], 0
    return [*chunks, waiting] if waiting else chunks


def _count_bytes(pairs: Chunk) -> int:
    """Return the size of both sides, as far as the dumps state shapes."""
    return sum(
        tensor.size_bytes
        for pair in pairs
        for series in (pair.expected, pair.actual)
        for tensors in series.tensors.values()
        for tensor in tensors
    )
