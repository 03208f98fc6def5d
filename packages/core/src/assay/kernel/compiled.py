"""The sums of the kernel, compiled from C at their first use.

Python caches compiled code in `__pycache__`, and so does this. Where that folder is read-only, the library lies
in `~/.cache/assay`.

Shape legend: R rows (tokens), C channels (last dim), T tokens, V vocabulary, k largest logits.
"""

import hashlib
import math
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ctypes import CDLL, POINTER, Structure, c_char_p, c_double, c_int32, c_int64, c_void_p
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import TypeVar, get_args

import torch
from torch import Tensor
from torch.nn import Parameter

from assay.kernel.sums import (
    BINNED_ELEMENTS,
    BINS,
    CELLS_PER_UNIT,
    COUNTS,
    FEWEST_IN_ROW,
    LARGEST_STRIDE,
    NUM_BINS,
    NUM_CHANNEL_SUMS,
    POOLED,
    REACH,
    ROW_FLOOR,
    SUMMANDS,
    CallSums,
    Extent,
    TokenSums,
    WorstElement,
    factors,
)

Result = TypeVar("Result")

FOLDER = Path(__file__).parent
SOURCES = ("pairs.c", "logits.c", "statistics.c")
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=fast", "-fPIC", "-shared")
# Each compiler knows one of them on each processor.
_NATIVE = ("-march=native", "-mcpu=native", "")
_SECONDS_TO_COMPILE = 60

# Number of elements in the rows that one thread computes. It does not depend on the number of threads,
# so neither do the sums.
SPAN_ELEMENTS = 1 << 20

DTYPES = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_NUM_TOKEN_SUMS = 11
_LANES = 8


class _Matrix(Structure):
    """A matrix whose rows lie `stride` elements apart."""

    _fields_ = (("data", c_void_p), ("stride", c_int64), ("dtype", c_int32))

    @classmethod
    def of(cls, tensor: Tensor) -> "_Matrix":
        return cls(tensor.data_ptr(), tensor.stride(0), DTYPES[tensor.dtype])


class _Plan(Structure):
    """Settings of the samples and statistics of a call."""

    _fields_ = (
        *((name, c_int64) for name in ("binned", "largest_stride", "fewest_in_row", "reach")),
        *((name, c_double) for name in ("row_floor", "cells_per_unit")),
        ("bin_of_cell", c_void_p),
        *((name, c_int32) for name in ("keeps_systematic", "rounds")),
    )

    @classmethod
    def of(cls, extent: Extent) -> "_Plan":
        return cls(
            BINNED_ELEMENTS, LARGEST_STRIDE, FEWEST_IN_ROW, REACH, ROW_FLOOR, CELLS_PER_UNIT,
            BINS.data_ptr(), extent != "norms", extent == "pointwise",
        )  # fmt: skip


_PLANS = {extent: _Plan.of(extent) for extent in get_args(Extent)}


class _Found(Structure):
    """Counts and the worst element of a span."""

    _fields_ = (
        *((name, c_int64) for name in (*COUNTS, "row", "channel")),
        *((name, c_double) for name in ("difference", "actual", "expected")),
    )


_Totals = c_double * len(SUMMANDS)
_counts_of = attrgetter(*COUNTS)


class _Statistics(Structure):
    """Statistics of a span."""

    _fields_ = (
        *((name, c_double) for name in ("low", "high", "sum", "squares", "projection")),
        *((name, c_int64) for name in ("num_nan", "num_inf")),
    )


@cache
def library() -> CDLL | None:
    """Load the compiled sums, and compile them if they are not there; None if nothing compiles them."""
    name, folders = file_name(), [FOLDER / "__pycache__"]
    with suppress(RuntimeError):  # the user of a container may have no home
        folders.append(Path.home() / ".cache" / "assay")
    for folder in folders:
        with suppress(OSError):
            return _declare(CDLL(str(folder / name)))
    for folder in folders:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if _compile(folder / name):
                return _declare(CDLL(str(folder / name)))
    return None


def file_name() -> str:
    """Return the name of the library for these sources on this processor."""
    sources = [(FOLDER / name).read_bytes() for name in (*SOURCES, "vectors.h")]
    identity = [*sources, *(word.encode() for word in (*_compiler(), *FLAGS, _processor()))]
    return f"sums-{hashlib.sha256(b'|'.join(identity)).hexdigest()[:16]}.so"


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CC", "cc"))


def _processor() -> str:
    """Return what the compiler sees of the processor: homes are shared by machines of several kinds."""
    words = [platform.machine(), platform.processor()]
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        kinds = ("model name", "flags", "features", "cpu")
        words += sorted({line for line in lines if line.lower().startswith(kinds)} - {""})
    return "\n".join(word for word in words if "MHz" not in word)


def _compile(target: Path) -> bool:
    """Compile the library; return False if no compiler is found, or it fails."""
    sources = [str(FOLDER / name) for name in SOURCES]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        for native in _NATIVE:
            command = [
                *_compiler(),
                *FLAGS,
                *filter(None, [native]),
                "-o",
                str(made),
                *sources,
                "-lm",
            ]
            with suppress(OSError, subprocess.SubprocessError):
                subprocess.run(
                    command, check=True, capture_output=True, timeout=_SECONDS_TO_COMPILE
                )
                made.replace(target)
                return True
    return False


def _declare(loaded: CDLL) -> CDLL:
    loaded.sum_pair.argtypes = (
        _Matrix, _Matrix, *[c_int64] * 4, c_int32, c_void_p, c_void_p, POINTER(_Found),
    )  # fmt: skip
    loaded.finish_pair.argtypes = (
        _Matrix, _Matrix, *[c_int64] * 2, POINTER(_Plan), *[c_void_p] * 4,
    )  # fmt: skip
    loaded.sum_tokens.argtypes = (_Matrix, _Matrix, *[c_int64] * 3, *[c_void_p] * 3)
    loaded.find_largest.argtypes = (_Matrix, *[c_int64] * 4, *[c_void_p] * 2)
    loaded.add_statistics.argtypes = (
        _Matrix, *[c_int64] * 3, *[c_void_p] * 2, POINTER(_Statistics),
    )  # fmt: skip
    for name in ("sum_pair", "finish_pair", "sum_tokens", "find_largest", "add_statistics"):
        getattr(loaded, name).restype = None
    loaded.names_of_sums.restype = c_char_p
    names = loaded.names_of_sums().decode().split()
    if names != list(POOLED):
        raise RuntimeError(f"pairs.c has the sums {names}, sums.py has {list(POOLED)}")
    return loaded


def _loaded() -> CDLL:
    loaded = library()
    if loaded is None:
        raise RuntimeError("no C compiler; assay.kernel chooses torch_sums then")
    return loaded


def can_read(tensor: Tensor) -> bool:
    """Return True if the values lie in the host's memory as they are, in a dtype that the library knows."""
    return (
        tensor.dtype in DTYPES
        and type(tensor) in (Tensor, Parameter)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_neg()
    )


def _readable(tensor: Tensor) -> Tensor:
    """Return the tensor in a layout that the library reads: the elements of a row lie side by side."""
    is_dense = tensor.shape[1] <= 1 or tensor.stride(1) == 1
    return tensor.detach() if is_dense else tensor.detach().contiguous()


def summarize(values_RC: Tensor) -> Tensor:
    """Compute `assay.kernel.summarize` in C."""
    values_RC = _readable(values_RC)
    matrix, function = _Matrix.of(values_RC), _loaded().add_statistics
    num_rows, num_channels = values_RC.shape
    dtype = torch.promote_types(values_RC.dtype, torch.float32)
    rows, channels = (factors(values_RC.shape[dim], dim, dtype) for dim in (0, 1))

    def measure_span(span: range) -> _Statistics:
        found = _Statistics(low=math.inf, high=-math.inf)
        function(
            matrix, num_channels, span.start, span.stop, rows.data_ptr(), channels.data_ptr(), found
        )
        return found

    spans = _map_on_threads(measure_span, _spans(num_rows, num_channels))
    num_nan, num_inf = sum(one.num_nan for one in spans), sum(one.num_inf for one in spans)
    low, high = min(one.low for one in spans), max(one.high for one in spans)
    return torch.tensor(
        [
            math.nan if num_nan else low,
            math.nan if num_nan else high,
            sum(one.sum for one in spans) / values_RC.numel(),
            math.sqrt(sum(one.squares for one in spans)),
            num_nan,
            num_inf,
            sum(one.projection for one in spans),
        ],
        dtype=torch.float64,
    )


def _map_on_threads(function: Callable[[range], Result], spans: Sequence[range]) -> list[Result]:
    number = torch.get_num_threads()
    if number == 1 or len(spans) == 1:
        return [function(span) for span in spans]
    return list(_pool(number).map(function, spans))


@cache
def _pool(number: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(number)


# A forked process does not have its parent's threads.
os.register_at_fork(after_in_child=_pool.cache_clear)


def _spans(num_rows: int, num_channels: int) -> list[range]:
    """Return the rows of each span."""
    height = max(1, SPAN_ELEMENTS // max(num_channels, 1))
    return [
        range(start, min(start + height, num_rows)) for start in range(0, num_rows, height)
    ] or [range(0)]


def sum_pair(actual_RC: Tensor, expected_RC: Tensor, extent: Extent) -> CallSums:
    """Compute `assay.kernel.sum_pair` in C."""
    actual_RC, expected_RC = _readable(actual_RC), _readable(expected_RC)
    pair = _Matrix.of(actual_RC), _Matrix.of(expected_RC)
    num_rows, num_channels = actual_RC.shape
    loaded, rounds = _loaded(), extent == "pointwise"
    rows = torch.zeros(len(SUMMANDS), num_rows, dtype=torch.float64)
    into = rows.data_ptr()

    def sum_span(span: range) -> tuple[Tensor, _Found]:
        channels = torch.zeros(NUM_CHANNEL_SUMS, num_channels, dtype=torch.float64)
        found = _Found(difference=-1.0)
        loaded.sum_pair(
            *pair, num_rows, num_channels, span.start, span.stop, rounds, into,
            None if extent == "norms" else channels.data_ptr(), found,
        )  # fmt: skip
        return channels, found

    spans = _map_on_threads(sum_span, _spans(num_rows, num_channels))
    channels, found = zip(*spans, strict=True)
    worst = max(found, key=lambda one: one.difference)
    bins, slopes = (torch.zeros(shape, dtype=torch.float64) for shape in ((NUM_BINS, 6), (4,)))
    totals = _Totals()
    loaded.finish_pair(
        *pair, num_rows, num_channels, _PLANS[extent], into, bins.data_ptr(), slopes.data_ptr(), totals,
    )  # fmt: skip
    return CallSums(
        *totals,
        *map(sum, zip(*map(_counts_of, found), strict=True)),
        rows=rows[:3],
        channels=sum(channels[1:], start=channels[0]),
        bins=bins.t(),
        row_slopes=slopes,
        worst=WorstElement(
            worst.difference, worst.actual, worst.expected, (worst.row, worst.channel)
        ),
    )


def sum_tokens(actual_TV: Tensor, expected_TV: Tensor, largest_T: Tensor) -> TokenSums:
    """Compute `assay.kernel.sum_tokens` in C."""
    actual_TV, expected_TV = _readable(actual_TV), _readable(expected_TV)
    largest_T = largest_T.double().contiguous()
    num_tokens, vocabulary = actual_TV.shape
    sums = torch.empty(num_tokens, _NUM_TOKEN_SUMS, dtype=torch.float64)
    matrices, function = (_Matrix.of(actual_TV), _Matrix.of(expected_TV)), _loaded().sum_tokens

    def sum_span(span: range) -> None:
        memory = torch.empty(2, vocabulary + _LANES, dtype=torch.float32)
        function(
            *matrices, vocabulary, span.start, span.stop, largest_T.data_ptr(), memory.data_ptr(),
            sums.data_ptr(),
        )  # fmt: skip

    _map_on_threads(sum_span, _spans(num_tokens, vocabulary))
    return TokenSums(*sums.t())


def find_largest(values_TV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Compute `assay.kernel.find_largest` in C."""
    values_TV = _readable(values_TV)
    num_tokens, vocabulary = values_TV.shape
    ids = torch.empty(num_tokens, k, dtype=torch.int64)
    values = torch.empty(num_tokens, k, dtype=torch.float64)
    matrix, function = _Matrix.of(values_TV), _loaded().find_largest

    def find_in_span(span: range) -> None:
        function(matrix, vocabulary, k, span.start, span.stop, ids.data_ptr(), values.data_ptr())

    _map_on_threads(find_in_span, _spans(num_tokens, vocabulary))
    return ids, values
