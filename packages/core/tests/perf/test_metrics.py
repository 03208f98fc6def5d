"""How fast tensors and logits are compared: bytes of both sides a second."""

import pytest
import torch
from torch import Tensor

from assay.generate.judging.distributions import compare_largest, largest
from assay.generate.judging.logits import TOP_K, compare_logits
from assay.metrics import PairSums
from packages.core.tests.perf.conftest import Table
from packages.core.tests.perf.stopwatch import Times, Work, median_times, take_turns

ROUNDS = 15
TOKENS = 256


def gigabytes_a_second(work: Work, sides: tuple[Tensor, Tensor], rounds: int = ROUNDS) -> Times:
    size = sum(side.nbytes for side in sides) / 1e9
    middle = median_times(take_turns({"work": work}, rounds)["work"])
    return Times(size / middle.wall, size / middle.cpu)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize(
    ("actual_dtype", "expected_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
    ids=["float32 against float32", "bfloat16 against float32"],
)
def test_tensors_are_compared_at_two_gigabytes_a_second(
    actual_dtype: torch.dtype,
    expected_dtype: torch.dtype,
    table: Table,
    request: pytest.FixtureRequest,
) -> None:
    expected = random(4096, 1024, dtype=expected_dtype)
    actual = (expected * (1 + 1e-7)).to(actual_dtype)
    address = torch.arange(len(expected))

    def compare() -> None:
        PairSums(counts_misrounded=False).add(actual, expected, address, address)

    alone = gigabytes_a_second(compare, (actual, expected))
    torch.set_num_threads(2)
    shared = gigabytes_a_second(compare, (actual, expected))
    # Two cores do what one does in half of the time, as long as both are there for us: what the
    # second thread costs in processor time is counted, what other processes take is not.
    on_two_cores = Times(shared.wall, 2 * shared.cpu)
    name = request.node.callspec.id
    table.at_least(
        f"tensor metrics on 2 cores, {name}", on_two_cores, 2.0,
        f"GB/s of both sides; {alone.cpu:.2f} on one core",
    )  # fmt: skip


@pytest.mark.parametrize("vocabulary", [32_000, 128_256])
def test_logits_are_compared_at_one_gigabyte_a_second(vocabulary: int, table: Table) -> None:
    expected = 3 * random(1, TOKENS, vocabulary)
    actual = expected + 0.01 * random(1, TOKENS, vocabulary)
    rows = expected[0], actual[0]

    def published() -> None:
        for start in range(0, TOKENS, 8):
            p, q = (side[start : start + 8] for side in rows)
            compare_largest(q, p, largest(p, TOP_K))

    table.at_least(
        f"four published logits metrics, vocabulary {vocabulary:,}",
        gigabytes_a_second(published, (actual, expected)), 3.0, "GB/s of both sides, one thread",
    )  # fmt: skip
    table.at_least(
        f"whole logits level, vocabulary {vocabulary:,}",
        gigabytes_a_second(lambda: compare_logits(actual, expected), (actual, expected), 7), 1.0,
        "GB/s of both sides, one thread",
    )  # fmt: skip
