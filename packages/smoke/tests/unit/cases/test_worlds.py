"""Tensors that are alive after a teardown."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from assay_smoke.cases.worlds import live_tensors, survivors


def test_tensors_that_outlive_are_counted_once_for_each_storage() -> None:
    before = live_tensors()

    kept = torch.zeros(5, 1000)
    views = [kept[:2], kept[2:]]
    size_bytes, shapes = survivors(before)

    assert len(views) == 2
    assert size_bytes == 4 * 5 * 1000
    assert len(shapes) == 1


def test_what_a_compiler_traces_with_takes_no_memory() -> None:
    before = live_tensors()

    with FakeTensorMode():
        fake = torch.zeros(5, 1000, device="cpu")
    size_bytes, _ = survivors(before)

    assert any(one is fake for one in live_tensors().values())
    assert size_bytes == 0
