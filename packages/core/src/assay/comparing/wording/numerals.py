"""Format of numbers in every message, table and picture."""

import math

# Three significant digits: errors and ratios of two runs rarely repeat more of them.
DIGITS = 3
_SMALLEST_PLAIN = 0.1
_LARGEST_PLAIN = 1e4
_MOST_DIGITS = 17  # enough to tell any two float64 values apart


def format_number(value: float, digits: int = DIGITS) -> str:
    """Format `value` with few digits.

    >>> [format_number(v) for v in (0.041, 14.62, 3.0, 518.4, 1.23e6, 0.0)]
    ['4.1e-2', '14.6', '3.0', '518', '1.23e6', '0']
    """
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    rounded = float(f"{mantissa}e{exponent}")
    if abs(rounded) < _SMALLEST_PLAIN or abs(rounded) >= _LARGEST_PLAIN:
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    decimals = max(0, digits - 1 - int(exponent))
    plain = f"{rounded:.{decimals}f}"
    if not decimals:
        return plain
    plain = plain.rstrip("0")
    return plain + "0" if plain.endswith(".") else plain


def format_count(count: int, noun: str) -> str:
    """Put a number before its noun.

    >>> [format_count(count, "tensor") for count in (1, 1200)]
    ['1 tensor', '1,200 tensors']
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_against(value: float, limit: float) -> tuple[str, str]:
    """Format both numbers with enough digits to show which one is larger.

    A ratio of 3.004 over a limit of 3 must not be printed as 3.0 over 3.0.
    """
    digits = DIGITS
    texts = format_number(value, digits), format_number(limit, digits)
    while value != limit and texts[0] == texts[1] and digits < _MOST_DIGITS:
        digits += 1
        texts = format_number(value, digits), format_number(limit, digits)
    return texts
