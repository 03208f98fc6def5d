"""How fast tensors and logits are compared, beside reading them and the published tool."""

from functools import partial

import pytest
import torch
from torch import Tensor

from assay.generate.text_levels import TOP_K, compare_largest, compare_logits
from assay.kernel import compiled, find_largest, torch_sums
from assay.metrics import PairSums
from packages.core.tests.perf.conftest import Table
from packages.core.tests.perf.published_tool import published_metrics
from packages.core.tests.perf.stopwatch import Times, Work, median_ratio, median_times, take_turns

ROUNDS = 7
TOKENS = 256

Sides = tuple[Tensor, Tensor]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def logits(vocabulary: int) -> Sides:
    expected = 3 * random(1, TOKENS, vocabulary)
    return expected + 0.01 * random(1, TOKENS, vocabulary), expected


def beside_reading(work: Work, sides: Sides) -> tuple[Times, str]:
    """How many times as long as reading both sides: a rate that holds here fails elsewhere."""
    times = take_turns({"work": work, "read": lambda: [side.sum() for side in sides]}, ROUNDS)
    size = sum(side.nbytes for side in sides) / 1e9
    work_rate, read_rate = (size / median_times(times[name]).cpu for name in ("work", "read"))
    note = f"reading both sides on one thread; {work_rate:.2f} GB/s, reading {read_rate:.1f}"
    return median_ratio(times["work"], times["read"]), note


@pytest.mark.parametrize(
    ("actual_dtype", "expected_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
    ids=["float32 against float32", "bfloat16 against float32"],
)
def test_tensors_are_compared_in_few_reads(
    actual_dtype: torch.dtype,
    expected_dtype: torch.dtype,
    table: Table,
    request: pytest.FixtureRequest,
) -> None:
    expected = random(4096, 1024, dtype=expected_dtype)
    actual = (expected * (1 + 1e-7)).to(actual_dtype)
    address = torch.arange(len(expected))

    def compare() -> None:
        PairSums().add(actual, expected, address, address)

    ratio, note = beside_reading(compare, (actual, expected))
    table.at_most(f"tensor metrics, {request.node.callspec.id}", ratio, 15.0, note)


@pytest.mark.parametrize("function", ["sum_pair", "find_largest"])
def test_sums_without_a_compiler_take_bearable_time(function: str, table: Table) -> None:
    if compiled.library() is None:
        pytest.skip("no C compiler")
    expected = random(2048, 1024)
    given = {
        "sum_pair": (expected.bfloat16(), expected, "all"),
        "find_largest": (random(TOKENS, 32_000), TOP_K),
    }[function]
    works = {
        name: partial(getattr(backend, function), *given)
        for name, backend in (("torch", torch_sums), ("C", compiled))
    }

    times = take_turns(works, ROUNDS)

    ratio = median_ratio(times["torch"], times["C"])
    table.at_most(f"{function} by torch", ratio, 80.0, "the same, compiled from C")


@pytest.mark.parametrize("vocabulary", [32_000, 128_256])
def test_logits_level_takes_few_reads(vocabulary: int, table: Table) -> None:
    actual, expected = logits(vocabulary)
    ratio, note = beside_reading(lambda: compare_logits(actual, expected), (actual, expected))
    table.at_most(f"whole logits level, vocabulary {vocabulary:,}", ratio, 20.0, note)


@pytest.mark.parametrize("vocabulary", [32_000, 128_256])
def test_published_metrics_are_faster_than_the_published_tool(
    vocabulary: int, table: Table
) -> None:
    actual, expected = logits(vocabulary)

    def ours() -> None:
        compare_largest(actual[0], expected[0], find_largest(expected[0], TOP_K)[0])

    times = take_turns(
        {"ours": ours, "theirs": lambda: published_metrics(actual[0], expected[0])}, ROUNDS
    )
    size = 2 * actual.nbytes / 1e9
    our_rate, their_rate = (size / median_times(times[name]).cpu for name in ("ours", "theirs"))
    note = f"aiu-fms-testing-utils; {our_rate:.2f} GB/s a thread, theirs {their_rate:.2f}"
    name = f"four published metrics, vocabulary {vocabulary:,}"
    table.at_most(name, median_ratio(times["ours"], times["theirs"]), 0.06, note)
