"""Arrays that a page carries in little room, and reads back without losing a printed digit.

A number is packed into 16 bits as it is printed: three significant decimal digits and an exponent,
900 codes for each decade. So a page never shows another number than the other faces do. What lies
beyond the 72 decades is shown as smaller or larger than the last one. `report.js` reads all back.
"""

import base64
import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from assay.comparing.numerals import DIGITS

ZERO, TINY, HUGE, INFINITE, NOT_A_NUMBER, ABSENT = 0, 1, 65532, 65533, 65534, 65535
SMALLEST_EXPONENT = -30
CODES_PER_DECADE = 900
_FIRST = TINY + 1
LARGEST_EXPONENT = SMALLEST_EXPONENT + (HUGE - _FIRST) // CODES_PER_DECADE - 1
MAX_LABELS = 1 << 16


def number_code(value: float) -> int:
    """The 16-bit code of the absolute value of `value`; larger values have larger codes."""
    if math.isnan(value):
        return NOT_A_NUMBER
    if math.isinf(value):
        return INFINITE
    if value == 0:
        return ZERO
    digits, exponent_text = f"{abs(value):.{DIGITS - 1}e}".split("e")
    exponent = int(exponent_text)
    if exponent < SMALLEST_EXPONENT:
        return TINY
    if exponent > LARGEST_EXPONENT:
        return HUGE
    mantissa = int(digits.replace(".", ""))
    return _FIRST + (exponent - SMALLEST_EXPONENT) * CODES_PER_DECADE + mantissa - 100


def pack_numbers(values: Iterable[float | None]) -> dict[str, object]:
    """Numbers as base64 of their codes, and which of them are negative; None is absent."""
    known = list(values)
    codes = np.fromiter(
        (ABSENT if value is None else number_code(value) for value in known),
        dtype=np.uint16,
        count=len(known),
    )
    negative = [number for number, value in enumerate(known) if value is not None and value < 0]
    return {"codes": _base64(codes), "negative": negative}


def pack_labels(values: Sequence[str | int | None]) -> dict[str, object]:
    """Repeated values as the list of different ones and 16-bit indices into it."""
    labels = list(dict.fromkeys(values))
    if len(labels) > MAX_LABELS:
        raise ValueError(f"{len(labels)} different labels do not fit into 16 bits")
    index = {label: number for number, label in enumerate(labels)}
    codes = np.fromiter((index[value] for value in values), dtype=np.uint16, count=len(values))
    return {"labels": labels, "codes": _base64(codes)}


def _base64(codes: NDArray[np.uint16]) -> str:
    return base64.b64encode(codes.astype("<u2").tobytes()).decode("ascii")
