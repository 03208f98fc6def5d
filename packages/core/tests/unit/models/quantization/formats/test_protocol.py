"""Packed integers, worked out by hand."""

import pytest
import torch

from assay.models.quantization.formats.protocol import packed_width, unpack_bits
from packages.core.tests.unit.models.quantization.rounding import (
    pack_words,
)


def test_nibbles_of_one_word() -> None:
    word = torch.tensor([[0x76543210]], dtype=torch.int32)
    assert unpack_bits(word, 4, 8).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_a_negative_word_has_its_highest_bit_set() -> None:
    assert unpack_bits(torch.tensor([[-1]], dtype=torch.int32), 8, 4).tolist() == [[255] * 4]


def test_three_bits_cross_words() -> None:
    # 10 values fill 30 bits; the 11th, 5 = 0b101, has two bits in the first word and one in the second.
    words = torch.tensor([[0x40000000, 0x00000001, 0]], dtype=torch.int32)
    assert unpack_bits(words, 3, 12).tolist() == [[0] * 10 + [5, 0]]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_every_width(bits: int) -> None:
    numbers = torch.arange(70).reshape(2, 35) * 13 % (1 << bits)
    packed = pack_words(numbers, bits)
    assert packed.shape[1] == packed_width(bits, 35)
    assert unpack_bits(packed, bits, 35).tolist() == numbers.tolist()
