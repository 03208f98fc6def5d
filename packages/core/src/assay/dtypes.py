"""Floating-point formats by name, without importing torch.

Source: IEEE 754-2019 for binary16/32/64; the bfloat16 and TF32 layouts as published by their
vendors; OCP 8-bit Floating Point Specification 1.0 for e4m3 (no infinity, largest value 448).
"""

from dataclasses import dataclass

from assay.errors import UsageError


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A binary floating-point format."""

    name: str
    significand_bits: int
    """Includes the hidden bit."""
    largest: float
    smallest: float
    """The smallest positive number, which may be subnormal."""

    @property
    def unit_roundoff(self) -> float:
        """Return the largest relative error of rounding to nearest, 2**-significand_bits.

        Source: Higham, Accuracy and Stability of Numerical Algorithms, 2.1.
        """
        return 2.0**-self.significand_bits

    @property
    def is_narrow(self) -> bool:
        """Return True if it is narrower than float32, in which mixed precision keeps weights."""
        return self.significand_bits < FORMATS["float32"].significand_bits


def _ieee(name: str, significand_bits: int, max_exponent: int) -> FloatFormat:
    """Make a format whose smallest exponent is 1 - `max_exponent`."""
    smallest = 2.0 ** (2 - max_exponent - significand_bits)
    largest = (2.0 - 2.0 ** (1 - significand_bits)) * 2.0**max_exponent
    return FloatFormat(name, significand_bits, largest, smallest)


FORMATS = {
    format_.name: format_
    for format_ in (
        _ieee("float64", 53, 1023),
        _ieee("float32", 24, 127),
        _ieee("tf32", 11, 127),
        _ieee("float16", 11, 15),
        _ieee("bfloat16", 8, 127),
        FloatFormat("float8_e4m3fn", 4, 448.0, 2.0**-9),
    )
}


# Relative errors that one code may have in two environments, by the dtype of its values.
# Not one value of a yardstick differed between torch 2.11.0, 2.13.0 and 2.14.1 on one CPU. Other processors sum in
# another order: float64 yardsticks of nine micro models on an Intel and an AMD CPU differ by at most 2e-15.
ENVIRONMENT_ROUNDING = {"float32": 1e-5, "float64": 1e-9}


def float_format(name: str) -> FloatFormat:
    """Return the format called `name`.

    Raises: UsageError for a name that is not in `FORMATS`.
    """
    try:
        return FORMATS[name]
    except KeyError:
        raise UsageError(f"unknown dtype {name!r}; known: {', '.join(FORMATS)}") from None
