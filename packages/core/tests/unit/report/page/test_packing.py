"""Numbers of a page survive packing with every digit that is printed."""

import base64
import math
import struct
from typing import Any

import numpy as np
import pytest

from assay.report.page.packing import number_code, number_codes, pack_labels, pack_numbers


def unpacked(packed: dict[str, Any]) -> list[int]:
    data = base64.b64decode(packed["codes"])
    return list(struct.unpack(f"<{len(data) // 2}H", data))


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.0, 0),
        (1e-31, 1),  # smaller than the smallest decade
        (1e-30, 2),
        (1.01e-30, 3),
        (9.99e-30, 2 + 899),
        (1.0, 2 + 30 * 900),
        (14.6, 2 + 31 * 900 + 46),
        (0.0999, 2 + 28 * 900 + 899),
        (0.09999, 2 + 29 * 900),  # rounds up into the next decade
        (9.99e41, 2 + 71 * 900 + 899),
        (1e42, 65532),  # larger than the largest decade
        (math.inf, 65533),
        (math.nan, 65534),
        (5e-324, 1),
    ],
)
def test_number_is_coded_by_its_three_digits_and_exponent(value: float, code: int) -> None:
    assert number_code(value) == code


def test_many_numbers_are_coded_like_single_ones() -> None:
    values = [0.0, 1e-31, 1e-30, 9.995, 9.985, 99.95, 0.9995, 999.5, 1e41, 9.99e41, 1e42, 1e300]
    values += [10.0**exponent for exponent in range(-32, 44)]
    values += [math.inf, math.nan, 5e-324]
    values += [(number + 0.5) / 100 for number in range(100, 1000)]  # where rounding is close
    codes = number_codes(np.array(values)).tolist()
    assert codes == [number_code(value) for value in values]


def test_signs_are_kept_with_the_codes() -> None:
    packed = pack_numbers([1.0, -1.0, -math.inf, None, -0.0])
    assert unpacked(packed) == [27002, 27002, 65533, 65535, 0]
    assert packed["negative"] == [1, 2]


def test_larger_numbers_have_larger_codes() -> None:
    values = [0.0, 1e-40, 1e-30, 0.1, 0.999, 1.0, 9.99, 10.0, 1e41, 1e300, math.inf]
    codes = [number_code(value) for value in values]
    assert codes == sorted(set(codes))


def test_labels_are_stored_once() -> None:
    packed = pack_labels(["b", "a", "b", None, 3])
    assert packed["labels"] == ["b", "a", None, 3]
    assert unpacked(packed) == [0, 1, 0, 2, 3]


def test_labels_beyond_16_bits_have_wider_codes() -> None:
    packed = pack_labels(range(65537))
    assert packed["wide"]
    codes = np.frombuffer(base64.b64decode(str(packed["codes"])), "<u4")
    assert codes.tolist() == list(range(65537))
    assert not pack_labels(range(65536))["wide"]
