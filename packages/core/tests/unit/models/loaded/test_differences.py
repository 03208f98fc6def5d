"""Bitwise comparison of tensors."""

import math

import torch

from assay.models.loaded.differences import is_cast_of, same_bits


def test_a_tensor_may_begin_at_any_byte_of_a_mapped_file() -> None:
    stored = torch.arange(64, dtype=torch.uint8)[4:36].view(torch.float32)
    assert stored.storage_offset() * stored.element_size() % 8 == 4
    assert is_cast_of(stored.clone(), stored)

    other = stored.clone()
    other[-1] += 1
    assert not is_cast_of(other, stored)


def test_bits_decide_and_not_values() -> None:
    assert same_bits(torch.tensor([math.nan]), torch.tensor([math.nan]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
