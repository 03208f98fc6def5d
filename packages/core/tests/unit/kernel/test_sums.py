"""The sums of both backends: compiled from C, and in torch."""

import math
import shutil
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from assay import kernel
from assay.kernel import NUM_BINS, POOLED, compiled, torch_sums
from assay.kernel.sums import BIN_EDGES, SUMMANDS, CallSums, Extent, bin_of, factors

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def require_compiler() -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    assert compiled.library() is not None, "cc does not compile the sums"


@pytest.fixture(params=["compiled", "torch"])
def backend(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "torch":
        return torch_sums
    require_compiler()
    return compiled


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def whole_numbers(rows: int, channels: int) -> tuple[Tensor, Tensor]:
    """Small whole numbers: every sum of theirs is exact, in whatever order."""
    generator = torch.Generator().manual_seed(0)
    expected = torch.randint(-4, 5, (rows, channels), generator=generator).double()
    return expected + torch.randint(-1, 2, (rows, channels), generator=generator), expected


def odd_pair(rows: int, channels: int) -> tuple[Tensor, Tensor]:
    """Values of many sizes, some of them not finite or of a mask, on one side or on both."""
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(rows, channels, generator=generator, dtype=torch.float64)
    expected *= 2.0 ** torch.randint(-9, 9, (rows, 1), generator=generator)
    actual = expected * (1 + 0.01 * torch.randn(rows, channels, generator=generator))
    lowest = float(torch.finfo(torch.bfloat16).min)
    odd = [math.nan, math.inf, -math.inf, lowest, 0.0, 1.0]
    places = [(a, e) for a in odd for e in odd]
    for number, (a, e) in enumerate(places):
        at = 3 * number % rows, (7 * number + 5) % channels
        actual[at], expected[at] = a, e
    return actual, expected


def assert_equal_sums(sums: CallSums, others: CallSums) -> None:
    for name in ("rows", "channels", "bins", "row_slopes"):
        one, other = getattr(sums, name), getattr(others, name)
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-9, equal_nan=True)
    for name in POOLED:
        assert getattr(sums, name) == pytest.approx(getattr(others, name), rel=1e-12)
    assert sums.worst == others.worst


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (3, 70), (64, 8), (65, 129), (9, 1000)])
def test_sums_are_those_of_the_definition(shape: tuple[int, int], backend: ModuleType) -> None:
    actual, expected = whole_numbers(*shape)
    d, e = actual - expected, expected

    sums = backend.sum_pair(actual, expected, "pointwise")

    scale = (e * e).sum(1).mean().sqrt().expand(len(e))
    norms = (e * e).sum(1).sqrt(), (d * d).sum(1).sqrt(), scale
    torch.testing.assert_close(sums.rows, torch.stack(norms), rtol=1e-15, atol=0.0)
    for name, summand in SUMMANDS.items():
        assert getattr(sums, name) == summand(d, e).sum()
    columns = [d.sum(0), (d * e).sum(0), (e * e).sum(0), (d * d).sum(0), e.sum(0)]
    assert torch.equal(sums.channels, torch.stack(columns))
    assert sums.num_misrounded == int((d != 0).sum())
    assert sums.worst.difference == 1.0
    assert sums.worst.index == tuple((d != 0).nonzero()[0].tolist())  # the first of equal ones


@pytest.mark.parametrize("actual_dtype", DTYPES)
@pytest.mark.parametrize("expected_dtype", DTYPES)
@pytest.mark.parametrize("shape", [(40, 37), (12, 300)])
def test_both_backends_agree(
    actual_dtype: torch.dtype, expected_dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    require_compiler()
    actual, expected = odd_pair(*shape)
    actual, expected = actual.to(actual_dtype), expected.to(expected_dtype)

    found = (one.sum_pair(actual, expected, "pointwise") for one in (compiled, torch_sums))

    assert_equal_sums(*found)


@pytest.mark.parametrize("extent", ["norms", "all"])
def test_an_extent_leaves_the_other_sums_empty(extent: Extent, backend: ModuleType) -> None:
    actual, expected = whole_numbers(7, 9)

    sums = backend.sum_pair(actual, expected, extent)

    assert bool(sums.rows.any())
    assert bool(sums.channels.any()) == bool(sums.bins.any()) == (extent == "all")
    assert sums.num_misrounded == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_may_lie_apart_and_channels_too(dtype: torch.dtype, backend: ModuleType) -> None:
    actual, expected = whole_numbers(20, 30)
    wide = torch.zeros(20, 50, dtype=dtype)
    wide[:, 10:40] = actual
    columns = expected.t().contiguous().t()

    found = backend.sum_pair(wide[:, 10:40], columns, "all")

    assert_equal_sums(found, backend.sum_pair(actual, expected, "all"))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_an_empty_pair_has_no_error(shape: tuple[int, int], backend: ModuleType) -> None:
    sums = backend.sum_pair(torch.ones(shape), torch.ones(shape), "all")

    assert (sums.dd, sums.ee, sums.num_nan, sums.worst.difference) == (0.0, 0.0, 0, -1.0)
    assert sums.rows.shape == (3, shape[0])
    assert not bool(sums.rows.any())


class Doubled(Tensor):
    """A tensor whose memory holds half of its values."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN206
        if function is Tensor.double:
            return args[0].as_subclass(Tensor).double() * 2
        return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(2, 3).as_subclass(Doubled),
        torch.complex(torch.ones(2, 3), torch.full((2, 3), -2.0)).conj().imag,
        torch.full((2, 3), 2).int(),
        torch.full((2, 3), 2.0).to(torch.float8_e4m3fn),
    ],
    ids=["subclass", "negated view", "int32", "float8"],
)
def test_values_that_do_not_lie_in_memory_as_they_are_go_through_torch(other: Tensor) -> None:
    assert kernel.sum_pair(other, torch.full((2, 3), 2.0)).dd == 0.0
    assert kernel.sum_pair(other, torch.zeros(2, 3)).dd == 24.0


def test_every_float16_is_widened_exactly() -> None:
    require_compiler()
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)[:, None]
    finite = every[every.isfinite()][:, None]

    sums = compiled.sum_pair(finite, finite.double(), "pointwise")

    assert (sums.dd, sums.num_misrounded) == (0.0, 0)
    assert torch.equal(sums.rows[0], finite[:, 0].double().abs())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_misrounded_are_the_values_that_torch_rounds_otherwise(
    dtype: torch.dtype, backend: ModuleType
) -> None:
    generator = torch.Generator().manual_seed(0)
    size = 2.0 ** torch.randint(-26, 18, (200, 100), generator=generator)
    expected = torch.randn(200, 100, generator=generator).double() * size
    # Halfway between two numbers of the dtype, where the even one is right.
    halfway = torch.nextafter(expected.to(dtype), torch.tensor(math.inf, dtype=dtype)).double()
    expected[::2] = ((expected.to(dtype).double() + halfway) / 2)[::2]
    rounded = expected.to(dtype)
    other = rounded.clone()
    other[5, :7] = torch.nextafter(other[5, :7], torch.tensor(math.inf, dtype=dtype))

    assert backend.sum_pair(rounded, expected, "pointwise").num_misrounded == 0
    assert backend.sum_pair(other, expected, "pointwise").num_misrounded == 7


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("rows", [5, 64, 65])
def test_sums_do_not_depend_on_threads(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    require_compiler()
    monkeypatch.setattr(compiled, "SPAN_ELEMENTS", 64)
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(rows, 8, generator=generator)
    actual = expected.bfloat16()
    actual[1, 0], actual[-1, 3] = math.nan, 99.0

    shared = compiled.sum_pair(actual, expected, "all")
    torch.set_num_threads(1)
    alone = compiled.sum_pair(actual, expected, "all")

    assert torch.equal(shared.channels, alone.channels)
    assert torch.equal(shared.rows.nan_to_num(-1), alone.rows.nan_to_num(-1))
    assert shared.num_nan == alone.num_nan == 1
    assert shared.worst == alone.worst
    assert shared.worst.index == (rows - 1, 3)
    assert shared.rows[1].isnan().nonzero()[:, 0].tolist() == [1]


@pytest.mark.parametrize("vocabulary", [1, 5, 511, 513, 2000])
def test_largest_are_those_of_a_stable_sort(vocabulary: int, backend: ModuleType) -> None:
    values = torch.randn(8, vocabulary, generator=torch.Generator().manual_seed(0))
    values[0] = 1.0  # all equal: the first ones
    values[1] = values[1].round()
    k = min(20, vocabulary)

    ids, largest = backend.find_largest(values.bfloat16(), k)

    expected = values.bfloat16().double().sort(dim=-1, descending=True, stable=True)
    assert torch.equal(ids, expected.indices[:, :k])
    assert torch.equal(largest, expected.values[:, :k])


def test_a_nan_is_smaller_than_all_numbers(backend: ModuleType) -> None:
    values = torch.tensor([[math.nan, 1.0, math.nan, 3.0, 2.0]])

    ids, largest = backend.find_largest(values, 2)

    assert (ids.tolist(), largest.tolist()) == ([[3, 4]], [[3.0, 2.0]])


@pytest.mark.parametrize("size", [0.0, 1e-6, 0.1, 1.0, 2.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_tokens_are_those_of_the_definition(
    size: float, dtype: torch.dtype, backend: ModuleType
) -> None:
    generator = torch.Generator().manual_seed(0)
    expected = 3 * torch.randn(6, 1003, generator=generator).to(dtype)
    actual = (expected.double() + size * torch.rand(6, 1003, generator=generator)).to(dtype)
    e, d = expected.double(), actual.double() - expected.double()
    p = e.softmax(-1)
    c = d - (p * d).sum(-1, keepdim=True)

    sums = backend.sum_tokens(actual, expected, e.amax(-1))

    def assert_close(found: Tensor, exact: Tensor, rel: float = 1e-6) -> None:
        torch.testing.assert_close(found, exact, rtol=rel, atol=1e-15)

    assert_close(sums.d, d.sum(-1), 1e-11)
    assert_close(sums.dd, (d * d).sum(-1), 1e-11)
    assert_close(sums.ee, (e * e).sum(-1), 1e-11)
    assert_close(sums.de, (d * e).sum(-1), 1e-9)
    assert_close(sums.e, e.sum(-1), 1e-11)
    assert torch.equal(sums.low, d.amin(-1))
    assert torch.equal(sums.high, d.amax(-1))
    assert_close(sums.spread, (d - d.mean(-1, keepdim=True)).square().sum(-1))
    assert_close(sums.mean, (p * d).sum(-1))
    assert_close(sums.rest + sums.excess, (p * (c.expm1() - c)).sum(-1), 1e-5)


def test_a_change_that_is_too_large_for_the_series_is_told(backend: ModuleType) -> None:
    expected = torch.zeros(2, 10)
    actual = expected.clone()
    actual[1, 3] = 9.0

    excess = backend.sum_tokens(actual, expected, torch.zeros(2)).excess

    assert excess.isnan().tolist() == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_value_lies_in_the_bin_that_a_search_finds(
    dtype: torch.dtype, backend: ModuleType
) -> None:
    values = torch.linspace(-9, 9, 10_001, dtype=dtype)
    values /= values.square().mean().sqrt()
    edges = torch.tensor(BIN_EDGES, dtype=dtype)
    counts = torch.bincount(torch.bucketize(values, edges), minlength=NUM_BINS)

    bins = backend.sum_pair(values[None], values[None], "all").bins

    assert bins[0].tolist() == counts.tolist()
    assert torch.bincount(bin_of(values, 1.0), minlength=NUM_BINS).tolist() == counts.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (64, 32), (5, 1003), (2100, 513)])
def test_statistics_are_those_of_the_definition(
    dtype: torch.dtype, shape: tuple[int, int], backend: ModuleType
) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator).to(dtype).t().contiguous().t()
    exact = values.double()
    precision = torch.promote_types(dtype, torch.float32)
    rows, channels = (factors(shape[dim], dim, precision) for dim in (0, 1))

    found = backend.summarize(values).double()

    sizes = [exact.min(), exact.max(), exact.mean(), exact.norm()]
    expected = torch.tensor([*sizes, 0.0, 0.0, rows @ exact @ channels])
    # torch adds up a norm in float32.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(exact.norm()))


def test_statistics_count_what_is_not_finite(backend: ModuleType) -> None:
    values = torch.tensor([[1.0, math.inf, 2.0], [-math.inf, 0.0, math.inf]])
    assert backend.summarize(values)[[0, 1, 4, 5]].tolist() == [-math.inf, math.inf, 0, 3]
    values[1, 1] = math.nan
    found = backend.summarize(values)
    assert found[:4].isnan().all()
    assert found[4:6].tolist() == [1, 3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_of_a_narrow_dtype_do_not_overflow(
    dtype: torch.dtype, backend: ModuleType
) -> None:
    found = backend.summarize(torch.full((3, 40_000), 512.0, dtype=dtype))
    assert found[:4].tolist() == [512.0, 512.0, 512.0, pytest.approx(512 * 120_000**0.5)]
