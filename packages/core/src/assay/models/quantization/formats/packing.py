"""Unpack integers of a few bits from the words of a tensor."""

import torch
from torch import Tensor

_BYTE_BITS = 8


def unpack_bits(packed: Tensor, num_bits: int, count: int) -> Tensor:
    """Unpack the first `count` integers of each row.

    A row is a stream of bits that starts with the lowest bit of its first byte. An integer may cross bytes
    and words. The GPTQ and compressed-tensors libraries write 2, 3, 4 and 8 bits this way.

    packed: integers of any width, [rows, words].
    Returns: uint8, [rows, count].
    """
    data = packed.contiguous().view(torch.uint8).reshape(len(packed), -1)
    if num_bits == _BYTE_BITS:
        return data[:, :count]
    mask = (1 << num_bits) - 1
    if _BYTE_BITS % num_bits == 0:
        shifts = torch.arange(0, _BYTE_BITS, num_bits, dtype=torch.uint8)
        return ((data.unsqueeze(-1) >> shifts) & mask).flatten(1)[:, :count]
    first_bit = torch.arange(count) * num_bits
    data = torch.nn.functional.pad(data, (0, 1))
    low = data[:, first_bit // _BYTE_BITS].to(torch.int32)
    high = data[:, first_bit // _BYTE_BITS + 1].to(torch.int32)
    return (((low | high << _BYTE_BITS) >> first_bit % _BYTE_BITS) & mask).to(torch.uint8)


def packed_width(num_bits: int, count: int) -> int:
    """Return the number of 32-bit words that hold `count` integers.

    >>> packed_width(3, 64)
    6
    """
    return -(-count * num_bits // 32)
