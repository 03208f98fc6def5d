"""Sums over pairs of tensors, in one pass, and the error statistics that follow from them.

`PairSums` pools all calls of one port: sums over elements, over channels (the last dim) and over bins of
the expected value. The process that runs the candidate computes the sums and stores nothing else. The
judging process computes the statistics from them. A statistic is therefore a function of the sums alone,
and a new one that needs another sum needs a new recording.

Why several sums: the relative error of a tensor shows a fault only if it is larger than the rounding of
all elements together. A small systematic error is far below that, but adds up where rounding cancels: in the
slope of actual on expected (a scale), in the mean of a channel (a bias, one wrong row of a weight), in the
mean of a bin of the expected value (another activation function), in the slopes of rows (a norm with
another epsilon). Each comes with its standard error, so that chance is not taken for a fault.

Invariants:
    - All sums are float64 sums of float64 differences, whatever the dtypes of the two tensors.
    - Sums do not depend on the number of threads; they depend on the order of calls, which is fixed.
    - A non-finite actual value is counted and left out of the sums; the error of its row is NaN.

Trap: a decode step is one row. Adding thousands of them one by one costs more than the sums, so
`add_later` collects small calls in one buffer and adds them together. Call `flush` before you read a
statistic.

Shape legend: R rows (tokens), C channels (last dim), K bins.
"""

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from assay.errors import UsageError
from assay.kernel import NUM_BINS, ROW_FLOOR, Extent, PooledSums, WorstElement, sum_pair

# Small calls are collected up to this number of elements: a decode step has a few hundred.
CHUNK_ELEMENTS = 1 << 16

# Fewer elements give a mean of a bin, or statistics of a channel, that are mostly chance.
FEWEST_IN_BIN = 16
FEWEST_CHANNEL_ROWS = 32


class ShapeMismatchError(UsageError):
    """Two tensors that should be compared have different shapes."""

    @classmethod
    def of(cls, actual: Tensor, expected: Tensor) -> Self:
        """Make the error for a pair."""
        return cls(f"actual has shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


@dataclass(slots=True)
class RowErrors:
    """Error norms of single rows, with their prompts and positions.

    Shapes: all (R,); `error` and `expected` are Euclidean norms, `scale` is the root mean square
    of the expected row norms of the same call.
    """

    prompt: Tensor
    position: Tensor
    error: Tensor
    expected: Tensor
    scale: Tensor

    @classmethod
    def concatenate(cls, parts: "list[RowErrors]") -> "RowErrors":
        """Join the rows of `parts`, in order."""
        names = cls.__slots__
        if not parts:
            return cls(*(torch.zeros(0) for _ in names))
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    def relative(self) -> Tensor:
        """Return the relative error of each row, (R,); nan if the actual row holds a NaN."""
        floor = ROW_FLOOR * self.scale
        denominator = torch.maximum(self.expected, floor)
        ratio = self.error / denominator
        ratio[(self.error == 0) & (denominator == 0)] = 0.0
        return ratio


@dataclass(slots=True)
class _CallBuffer:
    """A buffer that collects small calls of one width."""

    parts: tuple[Tensor, Tensor, Tensor, Tensor]
    """actual and expected (R, C), prompt and position (R,); only the first rows are used."""
    num_rows: int = 0
    num_calls: int = 0

    @classmethod
    def for_calls_like(cls, actual_RC: Tensor, expected_RC: Tensor) -> "_CallBuffer":
        """Make an empty buffer for calls of this width and these dtypes."""
        width = actual_RC.shape[1]
        num_rows = max(len(actual_RC), CHUNK_ELEMENTS // max(width, 1))
        values = (
            torch.empty(num_rows, width, dtype=tensor.dtype) for tensor in (actual_RC, expected_RC)
        )
        addresses = (torch.empty(num_rows, dtype=torch.long) for _ in range(2))
        return cls((*values, *addresses))  # type: ignore[arg-type]  # four of them

    def has_room_for(self, actual_RC: Tensor, expected_RC: Tensor) -> bool:
        """Return True if this call has the width and dtypes of the buffer, and fits."""
        actual, expected, *_ = self.parts
        return (
            actual.shape[1] == actual_RC.shape[1]
            and (actual.dtype, expected.dtype) == (actual_RC.dtype, expected_RC.dtype)
            and self.num_rows + len(actual_RC) <= len(actual)
        )

    def take(self, *call: Tensor) -> None:
        """Copy one call into the buffer."""
        end = self.num_rows + len(call[0])
        for part, tensor in zip(self.parts, call, strict=True):
            part[self.num_rows : end] = tensor
        self.num_rows = end
        self.num_calls += 1

    def __deepcopy__(self, memo: dict[int, object]) -> "_CallBuffer":
        """Copy the rows in use only."""
        del memo
        actual, expected, prompt, position = map(torch.empty_like, self.parts)
        copies = actual, expected, prompt, position
        for copied, rows in zip(copies, self.all_rows(), strict=True):
            copied[: self.num_rows] = rows
        return replace(self, parts=copies)

    def all_rows(self) -> tuple[Tensor, ...]:
        """Return the collected calls as one call."""
        return tuple(part[: self.num_rows] for part in self.parts)


@dataclass(slots=True)
class PairSums(PooledSums):
    """Sums over all compared pairs of one port; d = actual - expected, e = expected."""

    pointwise: bool = False
    """No operation of the stage adds values up. Counts misrounded elements, and sums `beyond_rounding`."""
    num_elements: int = 0
    num_calls: int = 0
    channel_rows: int = 0
    channel: Tensor | None = None
    """(5, C): sums of d, d e, e e, d d, e."""
    bins: Tensor = field(default_factory=lambda: _zeros(4, NUM_BINS))
    """(4, K): count, sums of d, d d, e; d and e over the root mean square of e."""
    beyond_rounding: Tensor | None = None
    """(2, K): the sums of d and d d again, for d = actual - rounded e; if `pointwise`."""
    row_slopes: Tensor = field(default_factory=lambda: _zeros(4))
    """(4,): number of rows; sums of their slopes, squared slopes and variances."""
    rows: list[RowErrors] = field(default_factory=list)
    worst: WorstElement = field(default_factory=WorstElement)
    """Its index is (prompt, position, channel)."""
    _collected: "_CallBuffer | None" = None

    def add_later(
        self, actual_RC: Tensor, expected_RC: Tensor, prompt: Tensor, position: Tensor
    ) -> None:
        """Add a large call at once, and collect small ones: decode steps are small."""
        if actual_RC.shape != expected_RC.shape:
            raise ShapeMismatchError.of(actual_RC, expected_RC)
        if self._collected is not None and not self._collected.has_room_for(actual_RC, expected_RC):
            self.flush()
        if actual_RC.numel() >= CHUNK_ELEMENTS:
            self.add(actual_RC, expected_RC, prompt, position)
            return
        if self._collected is None:
            self._collected = _CallBuffer.for_calls_like(actual_RC, expected_RC)
        self._collected.take(actual_RC, expected_RC, prompt, position)

    def flush(self) -> None:
        """Add the calls that `add_later` has collected."""
        if self._collected is not None:
            collected, self._collected = self._collected, None
            self.add(*collected.all_rows())
            self.num_calls += collected.num_calls - 1

    def add(self, actual_RC: Tensor, expected_RC: Tensor, prompt: Tensor, position: Tensor) -> None:
        """Add one call.

        Shapes: actual and expected (R, C); prompt and position (R,).
        Non-finite values are counted and left out of the sums; their rows have error nan.
        Raises: ShapeMismatchError if the shapes differ.
        """
        if actual_RC.shape != expected_RC.shape:
            raise ShapeMismatchError.of(actual_RC, expected_RC)
        self.num_calls += 1
        if actual_RC.numel() == 0:
            return
        sums = sum_pair(actual_RC, expected_RC, self._extent)
        self.num_elements += actual_RC.numel()
        self.pool(sums)
        self.bins += sums.bins[:4]
        if self.pointwise:
            beyond, known = sums.bins[4:], self.beyond_rounding
            self.beyond_rounding = beyond if known is None else known + beyond
        self.row_slopes += sums.row_slopes
        if self._extent != "norms":
            self._add_channels(sums.channels, len(actual_RC))
        if sums.worst.difference > self.worst.difference:
            row, channel = sums.worst.index
            address = int(prompt[row]), int(position[row]), channel
            self.worst = replace(sums.worst, index=address)
        expected, error, scale = sums.rows
        self.rows.append(RowErrors(prompt, position, error, expected, scale))

    @property
    def _extent(self) -> Extent:
        return "pointwise" if self.pointwise else "all"

    def _add_channels(self, channels: Tensor, num_rows: int) -> None:
        if self.channel is None:
            self.channel = torch.zeros_like(channels)
        if self.channel.shape == channels.shape:
            self.channel += channels
            self.channel_rows += num_rows

    # Statistics: each a function of the sums alone.

    @property
    def lacks_expected(self) -> bool:
        """Return True if an expected value is NaN or infinity and the actual one differs."""
        is_known = self.num_nan or self.num_inf
        return not is_known and any(bool(rows.error.isnan().any()) for rows in self.rows)

    @property
    def relative_error(self) -> float:
        """Return ||d|| / ||e||; inf if only e is zero, nan if a value was not finite.

        Source: Golub & Van Loan, Matrix Computations, 2.3 (norms).
        """
        return math.sqrt(self.relative(self.dd, self.ee))

    def relative(self, difference: float, size: float) -> float:
        """Return difference / size; inf if only the size is zero, nan if a value was not finite."""
        if self.num_nan or self.num_inf:
            return math.nan
        if size == 0:
            return math.inf if difference > 0 else 0.0
        return difference / size

    @property
    def slope(self) -> float:
        """Return the least-squares slope of d on e through the origin: the relative error of a scale."""
        return self.de / self.ee if self.ee else 0.0

    @property
    def slope_standard_error(self) -> float:
        """Return the standard error of `slope` under independent errors of unequal variance.

        Source: White, Econometrica 48 (1980) 817, for one regressor.
        """
        return math.sqrt(self.dede) / self.ee if self.ee else 0.0

    @property
    def slope_standard_error_by_channel(self) -> float:
        """Return the standard error of `slope` if the errors of a channel are alike in all rows; 0 if unknown.

        Nearly equal rows are rounded alike, so that more of them do not make the slope more certain.
        Source: Liang & Zeger, Biometrika 73 (1986) 13, for one regressor and clusters of channels.
        """
        if self.channel is None or not self.ee or not self._channels_hold_all:
            return 0.0
        _, de, ee, *_ = self.channel
        return float((de - self.slope * ee).norm()) / self.ee

    @property
    def num_row_slopes(self) -> int:
        """Return the number of rows that are long and large enough for a slope."""
        return int(self.row_slopes[0])

    def row_slope(self, allowed_slope: float = 0.0) -> tuple[float, float]:
        """Return the root mean square of the rows' slopes of d on e, and its expectation by chance.

        allowed_slope: subtracted from every row's slope.
        """
        count, total, square, variance = self.row_slopes.tolist()
        if not count:
            return 0.0, 0.0
        mean_square = (square - 2 * allowed_slope * total) / count + allowed_slope**2
        return math.sqrt(max(mean_square, 0.0)), math.sqrt(variance / count)

    @property
    def num_used_bins(self) -> int:
        """Return the number of bins with enough elements for a mean."""
        return int((self.bins[0] >= FEWEST_IN_BIN).sum())

    def bin_spread(self) -> float:
        """Return the root mean square of the bins' means of e, over the root mean square of e."""
        count, _, _, size = self.bins
        used = count >= FEWEST_IN_BIN
        return float((size[used] / count[used]).pow(2).mean().sqrt()) if bool(used.any()) else 0.0

    @property
    def misrounded_share(self) -> float:
        """Return the share of elements that differ from the expected value rounded to their dtype."""
        return self.num_misrounded / self.num_elements if self.num_elements else 0.0

    def bin_bias(self, allowed_slope: float = 0.0) -> tuple[float, float]:
        """Return the root mean square of the bins' mean errors, and its expectation by chance.

        allowed_slope: this many times e is subtracted from the error.
        Both are in units of the root mean square of e. Bins with fewer than FEWEST_IN_BIN elements are ignored.
        """
        return self._bias_of(self.bins[1:3], allowed_slope)

    def bin_bias_beyond_rounding(self, allowed_slope: float = 0.0) -> tuple[float, float] | None:
        """Return `bin_bias` of the errors beyond correct rounding; None if the stage adds values up."""
        if self.beyond_rounding is None:
            return None if self.num_elements else (0.0, 0.0)
        return self._bias_of(self.beyond_rounding, allowed_slope)

    def _bias_of(self, sums: Tensor, allowed_slope: float) -> tuple[float, float]:
        count, size, (total, square) = self.bins[0], self.bins[3], sums
        used = count >= FEWEST_IN_BIN
        if not bool(used.any()):
            return 0.0, 0.0
        n, mean = count[used], total[used] / count[used]
        variance = (square[used] / n - mean * mean).clamp(min=0)
        bias = mean - allowed_slope * size[used] / n
        return float((bias**2).mean().sqrt()), float((variance / n).mean().sqrt())

    @property
    def repetition(self) -> float:
        """Return the factor by which repeated rows increase the variance of a mean; 1 if all rows differ.

        The first layer computes the same for each repeated token, with the same error. If m_i of N rows
        repeat row i, the variance of their mean is that of a row times sum(m_i^2) / N^2. Rows with equal norms
        of errors and values count as repeated.
        """
        rows = RowErrors.concatenate(self.rows)
        norms = zip(rows.error.tolist(), rows.expected.tolist(), strict=True)
        counts = Counter(pair for pair in norms if pair[0] > 0).values()
        return sum(count * count for count in counts) / sum(counts) if counts else 1.0

    @property
    def has_channel_statistics(self) -> bool:
        """Return True if there are enough rows, and all calls had one width."""
        return self.channel_rows >= FEWEST_CHANNEL_ROWS and self._channels_hold_all

    @property
    def _channels_hold_all(self) -> bool:
        return (
            self.channel is not None
            and self.channel_rows * self.channel.shape[1] == self.num_elements
        )

    def worst_row(self) -> tuple[float, int, int]:
        """Return the largest relative error of a row, with its prompt and position; nan is largest."""
        rows = RowErrors.concatenate(self.rows)
        if rows.error.numel() == 0:
            return 0.0, -1, -1
        relative = rows.relative()
        index = int(torch.where(relative.isnan(), torch.inf, relative).argmax())
        return float(relative[index]), int(rows.prompt[index]), int(rows.position[index])


@dataclass(slots=True)
class NormSums(PairSums):
    """Norms of tensors and rows, and the worst element, for a judgment without noise. Other sums stay empty."""

    @property
    def _extent(self) -> Extent:
        return "norms"
