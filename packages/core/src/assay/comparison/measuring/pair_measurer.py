"""Measurement of all pairs of two dumps, pooled over the passes of every port.

Processes and, under torchrun, ranks divide the pairs by bytes. Without a noise run, `NoiseLaw` gives the errors
that a healthy run is expected to have.
"""

import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from tempfile import TemporaryFile
from typing import IO, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from assay.comparison.measuring.pair_values import (
    Coarseness,
    IncomparableError,
    NotNeededError,
    TensorPair,
    compare_copies,
    compare_norms,
    count_each,
    describe_shapes,
    distinct_weights,
    excuse_sign_flips,
    expects_nothing,
    find_first_step,
    give_comparable_dtype,
    give_one_shape,
    measure_coarseness,
    measure_parameter,
    read_norms,
)
from assay.comparison.measuring.placed_parts import (
    HeldCall,
    PlacementRules,
    find_rules,
    read_parts,
)
from assay.comparison.pairing.experts import Flip, ScoreNoise
from assay.comparison.pairing.matching import Matching
from assay.comparison.pairing.passes import Pass, PassPair, TokenAlignment
from assay.comparison.pairing.port_series import Port, Series, SeriesPair, list_repeats
from assay.dtypes import FORMATS, float_format
from assay.dumps.protocol import DumpedTensor
from assay.files import UnreadableFileError
from assay.hooks.row_positions import RowIndex
from assay.judge.results import PortResult
from assay.launch import Rank, TimeLimits, World, call, outer_world_size
from assay.launch.forked_pool import dump_mapped, load_mapped, map_forked
from assay.metrics import NormSums, PairSums
from assay.progress import Progress, subtask
from assay.replay.modules import add_error
from assay.replay.ports import (
    count_differences,
    is_any_mask,
    is_attention_mask,
    is_unnamed_mask,
)
from assay.sites import RowMap
from assay.stages import Stage
from assay.statistics import worst_error
from assay.value_changes import ROUNDOFFS

T = TypeVar("T")

# Consecutive pairs that one process measures.
Chunk = Sequence[SeriesPair]


@dataclass(slots=True)
class MeasuredPorts:
    """The measurements of two dumps by port."""

    results: dict[Port, dict[tuple[int, int], PortResult]] = field(default_factory=dict)
    """The sums of every port, by step and rank of ACTUAL. A generation pools its passes as step 0."""
    compared: int = 0
    updates: list[Port] = field(default_factory=list)
    """Ports of parameter changes between training steps, computed from the parameters."""
    unpaired: list[str] = field(default_factory=list)
    """Tensors without a partner in some passes, or with an incompatible shape."""
    norm_errors: dict[tuple[Port, int, int], float] = field(default_factory=dict)
    """Largest relative difference of norms by port, rank and step, where values are not compared."""
    repeated: list[tuple[str, str]] = field(default_factory=list)
    """Side and name of each port that repeats the same values in a pass."""
    sums: type[PairSums] = PairSums
    """The kind of sums for activations. Weights need norms only, gradients and updates all sums."""
    drift: list[tuple[int, float, float]] = field(default_factory=list)
    """Training step, and the squared norms of a parameter's difference at its start and of its expected values."""
    num_sign_flips: int = 0
    """Elements of updates that are excused, see `excuse_sign_flips`."""
    replica_errors: dict[tuple[Port, int], float] = field(default_factory=dict)
    """Largest difference between replicas, by port and rank of EXPECTED."""
    pairs: list[TensorPair] = field(default_factory=list)
    """Every pair with its metrics, if they are wanted."""
    coarse: dict[Port, Coarseness] = field(default_factory=dict)
    """Ports whose values lie on a coarser grid on one side."""

    def add_replica(self, port: Port, rank: int, error: float) -> None:
        """Add the difference of a replica in EXPECTED from the first one."""
        known = self.replica_errors.get((port, rank), 0.0)
        self.replica_errors[port, rank] = worst_error([known, error])

    def of(self, port: Port) -> list[PortResult]:
        """Return the sums of a port for each measured step and rank."""
        found = self.results.get(port, {})
        return [found[key] for key in sorted(found)]

    def at(self, port: Port, rank: int, step: int, value: Tensor, class_name: str) -> PortResult:
        """Return the sums of a port at a rank and step, which are created if needed."""
        of_port = self.results.setdefault(port, {})
        if (step, rank) not in of_port:
            kind = PairSums
            if port.phase == "forward":
                kind = NormSums if port.direction == "parameter" else self.sums
            of_port[step, rank] = PortResult(
                port.module, port.name, Stage(port.module, port.phase), len(self.results),
                str(value.dtype).removeprefix("torch."), class_name,
                sums=kind(), rank=rank, step=step,
            )  # fmt: skip
        return of_port[step, rank]

    def extend(self, later: "MeasuredPorts") -> None:
        """Add the measurements of later pairs, which have other ports."""
        self.compared += later.compared
        self.num_sign_flips += later.num_sign_flips
        for name in ("updates", "unpaired", "repeated", "drift", "pairs"):
            getattr(self, name).extend(getattr(later, name))
        for name in ("results", "norm_errors", "replica_errors", "coarse"):
            getattr(self, name).update(getattr(later, name))


# A part of one rank's tensor: the pair that holds it, and the values of actual and expected.
_ReadPart = tuple[TensorPair, Tensor, Tensor]


@dataclass
class PairMeasurer:
    """Measures the pairs of two dumps on all ranks."""

    alignment: TokenAlignment
    is_training: bool
    first_different: Mapping[int, int]
    """Position of the first different token by prompt. Later rows are left out."""
    flips: Sequence[Flip] = ()
    """Tokens routed to other experts at a near tie. They are left out from that router on."""
    flips_spread: bool = False
    """True to leave out later tokens of their prompts too."""
    by_statistics: bool = False
    """True to compare norms even where both dumps hold values."""
    finds_coarse: bool = False
    """True to look for values on a coarser grid on one side."""
    add_metrics: Callable[[TensorPair], TensorPair] | None = None
    """Return a pair with its metrics. None to keep no pairs."""
    measured: MeasuredPorts = field(default_factory=MeasuredPorts)
    _indexes: dict[int, RowIndex] = field(default_factory=dict, init=False)

    def measure(self, matching: Matching) -> MeasuredPorts:
        """Measure every pair in the expected order, on all cores."""
        for measured in map_chunks(self._measure_chunk, divide_pairs(matching.pairs)):
            self.measured.extend(measured)
        for series in matching.absent_masks:
            self._measure_mask(series, lambda pair: pair.expected)
        for series in matching.extra_masks:
            self._measure_mask(series, lambda pair: pair.actual)
        return self.measured

    def _measure_chunk(self, chunk: Chunk) -> MeasuredPorts:
        part = replace(self, measured=MeasuredPorts(sums=self.measured.sums))
        part.measure_pairs(chunk)
        return part.measured

    def measure_pairs(self, pairs: Sequence[SeriesPair]) -> None:
        """Measure pairs in this process."""
        for matched in pairs:
            if matched.port.is_of_parameter:
                self._measure_parameters(matched)
                if self.is_training and matched.port.phase == "forward":
                    self._measure_updates(matched)
            else:
                self._measure_activations(matched)
        for results in self.measured.results.values():
            for result in results.values():
                result.sums.flush()

    def _observe(self, pair: TensorPair) -> None:
        if self.add_metrics is not None:
            self.measured.pairs.append(self.add_metrics(pair))
        port, coarse = pair.port, self.measured.coarse
        is_wanted = self.finds_coarse and port.direction in ("output", "parameter")
        if is_wanted and pair.values and port not in coarse:
            # The values may have been widened after reading.
            stored = [getattr(torch, one.dtype, None) for one in (pair.actual, pair.expected)]
            found = measure_coarseness(*pair.values, [one for one in stored if one is not None])
            if found is not None and found.side:
                coarse[port] = found

    def _place(self, port: Port, tensor: DumpedTensor) -> tuple[Port, int, int]:
        """Return the port, rank and step whose sums include an actual tensor."""
        return port, tensor.writer, tensor.site.at.step if self.is_training else 0

    def _measure_activations(self, matched: SeriesPair) -> None:
        repeats = list_repeats(matched.expected), list_repeats(matched.actual)
        # Tools may record an argument again for every module that passes it on.
        if matched.port.direction != "input":
            named = zip(("EXPECTED", "ACTUAL"), repeats, strict=True)
            found = [(side, str(matched.port)) for side, keys in named if keys]
            self.measured.repeated += [one for one in found if one not in self.measured.repeated]
        for held, parts in self._read_calls(matched, self._list_calls(matched, repeats[0])):
            for part in parts:
                if held.tokens is not None:
                    with self._left_out([part[0]]):
                        self._add(matched, held.tokens, part)

    def _list_calls(
        self, matched: SeriesPair, repeats: Collection[tuple[int, int, int]]
    ) -> list[HeldCall]:
        """Return the calls that both sides hold, in all pairs of passes.

        repeats: expected calls that repeat others. They need no partner.
        """
        series, calls = matched.expected, list[HeldCall]()
        for key, tensors in series.tensors.items():
            batch, step, number = key
            for pair in self.alignment.pairs_of.get((batch, step), ()):
                others = matched.actual.tensors.get((*pair.actual.number, number))
                if others is not None:
                    tokens = pair.by_row() if self._flips_in(pair, series.order) else pair
                    calls.append(HeldCall(tensors, others, tokens))
                elif key not in repeats and (
                    pair.expected_rows is None or not _needs_none(series, pair, tensors)
                ):
                    self.measured.unpaired.append(f"{series.port} at step {step}")
        return calls

    def _read_calls(
        self, matched: SeriesPair, calls: Sequence[HeldCall]
    ) -> Iterator[tuple[HeldCall, list[_ReadPart]]]:
        rules = find_rules(matched, calls)
        for held in calls:
            yield held, self._read(matched, held, rules)

    def _read(
        self, matched: SeriesPair, held: HeldCall, rules: PlacementRules | None
    ) -> list[_ReadPart]:
        """Return the parts of the actual ranks; none if only norms can be compared."""
        port, tensors, others = matched.port, held.expected, held.actual
        # The last tensor of the side with fewer ranks pairs with all remaining ones.
        pairs = [
            TensorPair(port, tensors[min(n, len(tensors) - 1)], others[min(n, len(others) - 1)])
            for n in range(max(len(tensors), len(others)))
        ]
        parts: list[tuple[int, Tensor, Tensor]] = []
        with self._left_out(pairs):
            if self.by_statistics or not all(one.has_values for one in (*tensors, *others)):
                self._compare_norms(matched, held, pairs)
                return []
            parts, replica_errors = read_parts(matched, held, rules)
            for holder, difference in replica_errors.items():
                self.measured.add_replica(port, tensors[holder].writer, difference)
            measured = {holder for holder, _, _ in parts}
            for number, pair in enumerate(pairs):
                if number not in measured:
                    self._observe(pair)  # measured as part of another shard or sum
        return [(pairs[holder], value, reference) for holder, value, reference in parts]

    @contextmanager
    def _left_out(self, pairs: list[TensorPair]) -> Iterator[None]:
        """Note the reason why pairs cannot be compared, and leave the context."""
        try:
            yield
        except (UnreadableFileError, IncomparableError) as error:
            if not isinstance(error, NotNeededError):
                step = pairs[0].expected.site.at.step
                self.measured.unpaired.append(f"{pairs[0].port} at step {step}: {error}")
            for pair in pairs:
                self._observe(replace(pair, reason=str(error)))

    def _compare_norms(self, matched: SeriesPair, held: HeldCall, pairs: list[TensorPair]) -> None:
        if held.tokens is not None and not held.tokens.is_of_as_many_tokens:
            raise IncomparableError("norms of other tokens are not compared")
        dtype = held.expected[0].dtype or held.actual[0].dtype
        if dtype and not dtype.startswith(("float", "bfloat")):
            raise NotNeededError("tools record no norm of integers")
        is_part = matched.expected_span is not None or matched.actual_span is not None
        norms = [(read_norms(pair.expected), read_norms(pair.actual)) for pair in pairs]
        are_alike = len(held.expected) == len(held.actual) and not is_part
        if not are_alike or any(None in both for both in norms):
            raise IncomparableError("no norm to compare")
        for pair, (expected, actual) in zip(pairs, norms, strict=True):
            with self._left_out([pair]):
                error = compare_norms(actual or {}, expected or {})
                if error is None:
                    raise IncomparableError("EXPECTED holds NaN or infinity")
                # Norms cover all tokens of a pass: once one differs, later passes hold other tokens.
                key = matched.port, pair.actual.writer, pair.actual.site.at.step
                known = self.measured.norm_errors.get(key, 0.0)
                self.measured.norm_errors[key] = worst_error([known, error])
                empty = torch.empty(0, dtype=getattr(torch, pair.actual.dtype, torch.float32))
                self.measured.at(*key, empty, matched.expected.class_name)
                self._observe(pair)
                self.measured.compared += 1

    def _add(self, matched: SeriesPair, pair: PassPair, part: _ReadPart) -> None:
        """Add the values of the tokens that both sides hold to the sums of a port."""
        tensors, value, reference = part
        pair = pair.of_sequences(reference.shape, value.shape)
        rows = pair.rows_at(tensors.expected.site.at)
        place = self._place(matched.port, tensors.actual)
        if _are_masks(matched.port, pair, value, reference):
            result = self.measured.at(*place, torch.empty(0, dtype=torch.bool), "")
            result.exact.add(*count_differences(value, reference, rows))
            compared, num_rows = None, 0
        else:
            value, reference, rows = give_one_shape(pair, value, reference, rows)
            result = self.measured.at(*place, value, matched.expected.class_name)
            value, reference = give_comparable_dtype(value, reference)
            value, reference = count_each(value, reference, rows)
            compared = add_error(
                result,
                self._index_of(pair, rows),
                rows,
                self._excluded(rows, self._flips_in(pair, matched.expected.order)),
                value,
                reference,
            )
            num_rows = len(compared[0]) if reference.is_floating_point() else 0
        result.end_pass(pair.expected.number, num_rows)
        self.measured.compared += 1
        self._observe(replace(tensors, values=compared))

    def _index_of(self, pair: PassPair, rows: RowMap | None) -> RowIndex:
        """Return the addresses of rows. The tensors of a pass share one index."""
        if rows is None or rows is not pair.expected.rows:
            return RowIndex(rows)
        return self._indexes.setdefault(id(rows), RowIndex(rows))

    def _flips_in(self, pair: PassPair, order: int) -> dict[int, list[int]]:
        """Return the positions of flips in a pass by prompt, from routers up to `order`."""
        prompts = set(pair.rows.prompts) if pair.rows is not None else set()
        found: dict[int, list[int]] = {}
        for flip in self.flips:
            if flip.order <= order and flip.prompt in prompts:
                found.setdefault(flip.prompt, []).append(flip.position)
        return found

    def _excluded(self, rows: RowMap | None, flips: Mapping[int, list[int]]) -> Tensor | None:
        """Return which rows to exclude, (B,) bool; None for no row.

        A row with a flip, or with a token after a different one, is excluded.
        """
        if rows is None or not (self.first_different or flips):
            return None
        return torch.tensor(
            [
                last >= self.first_different.get(prompt, last + 1)
                or any(
                    last == at or (self.flips_spread and last > at) for at in flips.get(prompt, ())
                )
                for prompt, last in zip(rows.prompts, map(max, rows.positions), strict=True)
            ]
        )

    def _measure_parameters(self, matched: SeriesPair) -> None:
        """Measure a parameter, or its gradient, once for each step."""
        port = matched.port
        first = find_first_step(matched)
        held = distinct_weights(matched.expected, first), distinct_weights(matched.actual, first)
        calls: list[HeldCall] = []
        for key, copies in held[0].items():
            if key not in held[1]:
                self.measured.unpaired.append(f"{port} at step {key[1]}")
                continue
            calls += [HeldCall(copies[0], others, None) for others in held[1][key]]
            for writer, difference in compare_copies(copies):
                self.measured.add_replica(port, writer, difference)
        for _, parts in self._read_calls(matched, calls):
            for part in parts:
                with self._left_out([part[0]]):
                    self._add_parameter(matched, part)

    def _add_parameter(self, matched: SeriesPair, part: _ReadPart) -> None:
        pair, value, reference = part
        if value.shape != reference.shape:
            raise IncomparableError(describe_shapes(value, reference))
        self.measured.compared += 1
        place = self._place(matched.port, pair.actual)
        result = self.measured.at(*place, value, matched.expected.class_name)
        if matched.port.phase == "forward":
            compared = measure_parameter(result, value, reference)
        else:
            both = give_comparable_dtype(value, reference)
            compared = add_error(result, RowIndex(None), None, None, *both)
        self._observe(replace(pair, values=compared))

    def _measure_updates(self, matched: SeriesPair) -> None:
        """Measure the changes of a parameter between training steps."""
        firsts = {key[1]: key for key in reversed(matched.expected.tensors)}
        steps = sorted(firsts)
        name = matched.port.name.replace("parameter.", "update.", 1)
        port = Port(matched.port.module, name, "optimizer")
        calls = {
            step: HeldCall(matched.expected.tensors[key], matched.actual.tensors[key], None)
            for step, key in firsts.items()
            if key in matched.actual.tensors
        }
        parts_of = [parts for _, parts in self._read_calls(matched, [*calls.values()])]
        read = dict(zip(calls, parts_of, strict=True))
        for step, following in pairwise(steps):
            for before, after in zip(read.get(step, []), read.get(following, []), strict=False):
                (pair, *old), (_, *new) = before, after
                if len({one.shape for one in (*old, *new)}) > 1:
                    continue
                starts, ends = ([one.double() for one in side] for side in (old, new))
                value, reference = (late - early for early, late in zip(starts, ends, strict=True))
                drift, size = (float(one.square().sum()) for one in (ends[0] - ends[1], ends[1]))
                self.measured.drift.append((following, drift, size))
                place = self._place(port, pair.actual)
                result = self.measured.at(*place, old[0], matched.expected.class_name)
                reference, num_flips = excuse_sign_flips(value, reference)
                self.measured.num_sign_flips += num_flips
                add_error(result, RowIndex(None), None, None, value, reference)
                self.measured.compared += 1
                if port not in self.measured.updates:
                    self.measured.updates.append(port)

    def _measure_mask(self, series: Series, side: Callable[[PassPair], Pass]) -> None:
        """Compare a mask of one side with the mask that attention applies without one."""
        for (batch, step, _), (tensor, *_) in series.tensors.items():
            for pair in self.alignment.pairs:
                if side(pair).number != (batch, step) or pair.expected_rows is not None:
                    continue
                mask = tensor.read_intact()
                if mask is None and tensor.has_values:
                    self.measured.unpaired.append(f"{series.port} at step {step}: damaged")
                elif mask is not None and is_any_mask(series.port.name, mask):
                    if mask.dtype is torch.bool and not mask.diagonal(dim1=-2, dim2=-1).any():
                        mask = ~mask  # True for pairs that are left out, as in Megatron
                    result = self.measured.at(series.port, 0, 0, mask, series.class_name)
                    result.exact.add(*count_differences(None, mask, pair.rows))
                    result.end_pass(pair.expected.number)


def _needs_none(series: Series, pair: PassPair, tensors: Sequence[DumpedTensor]) -> bool:
    """Return True for tensors without a needed partner: masks of other batches, or other tokens."""
    values = [one.read_intact() for one in tensors]
    return any(
        one is not None and (is_any_mask(series.port.name, one) or expects_nothing(pair, one))
        for one in values
    )


def _are_masks(port: Port, pair: PassPair, value: Tensor, reference: Tensor) -> bool:
    """Return True for two masks, of attention or of padding.

    Raises: NotNeededError for masks of some of the tokens: the output of attention shows a wrong one.
    """
    both = value, reference
    are_of_attention = [
        is_attention_mask(port.name, one) or (port.is_positional and is_unnamed_mask(one))
        for one in both
    ]
    if pair.expected_rows is not None:
        if any(are_of_attention) or is_any_mask(port.name, reference):
            raise NotNeededError("masks of other tokens are not compared")
        return False
    return all(are_of_attention) or (
        value.shape == reference.shape and all(is_any_mask(port.name, one) for one in both)
    )


# Measuring this many bytes takes a tenth of a second, about as long as starting a process.
_FEWEST_BYTES = 64 << 20
# With about this many chunks, 16 cores finish nearly together.
_NUM_CHUNKS = 128

# An idle rank waits for the others.
_LONGEST = timedelta(days=7).total_seconds()


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
    with subtask("comparing", sum(sizes.values()), "bytes") as task:
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


# The same as `ROUNDOFFS`, for gradients: they are sums over all tokens, with terms that cancel. In a trained
# model of 4 blocks, a float32 step differs from float64 by up to 48 unit roundoffs per root of a block, in
# its k_proj.
TRAINING_ROUNDOFFS = 64.0


# Activations and gradients differ by up to this many times the relative difference of the weights, per root
# of a block: measured in 4 steps of AdamW on two ranks against one.
ACTIVATION_DRIFT = 2.0


GRADIENT_DRIFT = 4.0


# The relative change of a weight in one step of Adam, assumed where weights are not recorded: a learning rate
# of 1e-3 and weights of 0.05.
UPDATE_SIZE = 0.02


@dataclass(frozen=True, slots=True)
class NoiseLaw:
    """The expected relative error without a noise run."""

    unit_roundoff: float
    num_blocks: int = 0
    drift: Mapping[int, float] = field(default_factory=dict)
    """Relative difference of all parameters at the start of each training step."""

    def expected(self, port: Port, depth: int, step: int = 0) -> float:
        """Return the error of a port after `depth` blocks, in a training step."""
        drift = self._drift_at(step)
        if port.phase == "forward":
            return (ROUNDOFFS * self.unit_roundoff + ACTIVATION_DRIFT * drift) * math.sqrt(
                1 + depth
            )
        # The backward pass visits all blocks again.
        return self.gradient_roundoff + GRADIENT_DRIFT * drift * self._blocks

    @property
    def _blocks(self) -> float:
        return math.sqrt(1 + 2 * self.num_blocks)

    @property
    def gradient_roundoff(self) -> float:
        """Return the error of gradients if the weights are equal."""
        return TRAINING_ROUNDOFFS * self.unit_roundoff * self._blocks

    def _drift_at(self, step: int) -> float:
        if step in self.drift or not step:
            return self.drift.get(step, 0.0)
        return step * UPDATE_SIZE * adam_error(self.gradient_roundoff)


def adam_error(gradient_error: float) -> float:
    """Return the relative error of an update of Adam from the relative error of its gradient.

    Adam divides a gradient by its size. Where the gradient is below its noise, the update has a random sign.
    The fraction of such elements is about the relative error.
    """
    return math.sqrt(gradient_error)


def expected_score_noise(unit_roundoff: float) -> ScoreNoise:
    """Return a function that derives the noise of router scores from dtype and depth."""

    def noise(port: Port, scores: Tensor) -> float:
        expected = NoiseLaw(unit_roundoff).expected(port, count_blocks(port.module))
        return expected * float(scores.double().pow(2).mean().sqrt())

    return noise


def measured_score_noise(noise: MeasuredPorts, otherwise: ScoreNoise) -> ScoreNoise:
    """Return a function that reads the noise of router scores, and falls back to `otherwise`."""

    def measured(port: Port, scores: Tensor) -> float:
        found = noise.of(port)
        if not found or not found[0].sums.num_elements:
            return otherwise(port, scores)
        return math.sqrt(found[0].sums.dd / found[0].sums.num_elements)

    return measured


def count_blocks(module: str) -> int:
    """Return the number of blocks up to a module, from the first number in its path."""
    number = re.search(r"\.(\d+)(?:\.|$)", module)
    return int(number[1]) + 1 if number else 0


def coarser_unit(dtypes: Iterable[str]) -> float:
    """Return the largest unit roundoff of the floating dtypes, or of float32 without any."""
    units = [float_format(name).unit_roundoff for name in dtypes if name in FORMATS]
    return max(units, default=float_format("float32").unit_roundoff)
