"""Times of assay's own capture and comparison."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

import assay
from assay.devices.base import Device
from assay.metrics import PairSums
from assay.models import LoadedModel
from assay.trace import Trace
from assay_bench.performance.suites.measurement import Amounts, SuiteTimer

NUM_ROWS = 2
LENGTH = 64
# The size of values at a module boundary. For larger tensors the allocator of some processes requests pages
# from the system every time, which doubles their time.
COMPARED_SHAPE = (256, 1024)
NUM_PAIRS = 8


def test_capture(measure: SuiteTimer, loaded: LoadedModel, device: Device, tmp_path: Path) -> None:
    """Run a forward pass and write every tensor of every module."""
    length = min(LENGTH, loaded.max_positions or LENGTH)
    ids_BT = torch.arange(NUM_ROWS * length, device=device.torch_device) % loaded.vocab_size
    folder = tmp_path / "trace"

    @torch.no_grad()
    def record(target: Path) -> None:
        with assay.capture(loaded.model, target), device.execution():
            loaded.model(input_ids=ids_BT.view(NUM_ROWS, length))

    def remove() -> Path:
        shutil.rmtree(folder)
        return folder

    record(folder)
    size_bytes = Trace.open(folder).unique_bytes
    assert size_bytes > 0
    measure(remove, record, Amounts(num_tokens=ids_BT.numel(), num_bytes=size_bytes))


@pytest.mark.usefixtures("one_thread")
def test_compare(measure: SuiteTimer) -> None:
    """Compute all sums of a check between two tensors on the host, several times."""
    expected = torch.randn(COMPARED_SHAPE, generator=torch.Generator().manual_seed(0))
    actual = expected * (1 + 1e-7)
    rows = torch.arange(len(expected))

    def compare(pair: tuple[Tensor, Tensor]) -> None:
        for _ in range(NUM_PAIRS):
            PairSums().add(*pair, rows, rows)

    assert not torch.equal(actual, expected)
    num_bytes = NUM_PAIRS * (actual.nbytes + expected.nbytes)
    measure(lambda: (actual, expected), compare, Amounts(num_bytes=num_bytes))
