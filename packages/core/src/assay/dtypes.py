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
    significand_bits: int  # with the hidden bit
    largest: float

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding to nearest, 2**-significand_bits.

        Source: Higham, Accuracy and Stability of Numerical Algorithms, 2.1.
        """
        return 2.0**-self.significand_bits

    @property
    def is_narrow(self) -> bool:
        """Whether it is narrower than float32, in which mixed precision keeps weights."""
        return self.significand_bits < FORMATS["float32"].significand_bits


def _largest(significand_bits: int, max_exponent: int) -> float:
    return (2.0 - 2.0 ** (1 - significand_bits)) * 2.0**max_exponent


FORMATS = {
    format_.name: format_
    for format_ in (
        FloatFormat("float64", 53, _largest(53, 1023)),
        FloatFormat("float32", 24, _largest(24, 127)),
        FloatFormat("tf32", 11, _largest(11, 127)),
        FloatFormat("float16", 11, _largest(11, 15)),
        FloatFormat("bfloat16", 8, _largest(8, 127)),
        FloatFormat("float8_e4m3fn", 4, 448.0),
    )
}


def float_format(name: str) -> FloatFormat:
    """The format called `name`.

    Raises: UsageError for a name that is not in `FORMATS`.
    """
    try:
        return FORMATS[name]
    except KeyError:
        raise UsageError(f"unknown dtype {name!r}; known: {', '.join(FORMATS)}") from None
