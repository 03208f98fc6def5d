r"""The variants of the simulated accelerator and their error bounds.

Let s = sum_k a_k b_k be one element of a matrix product with K terms, S = sum_k |a_k b_k|, u the unit
roundoff of the dtype (`assay.dtypes`), v = 2^-24 that of float32, and fl the computed value. Sums inside
a part use float32 (\|error\| <= K v S), so for every variant |fl - s| is at most K v S plus, to first
order,

| name | what happens | bound |
|---|---|---|
| `split4` (also plain `sim`), `split2` | K is cut into P parts; the sum of each part is rounded to the dtype, and the parts are added in sequence in the dtype | P u S |
| `truncate` | the sum is rounded toward zero; its mean error is half a unit in the last place | 2 u \|s\| |
| `tf32` | float32 operands are rounded to TF32 | 2^-10 S + u \|s\| |
| `fp16acc` | 16 terms at a time are added to an accumulator in float16, which overflows at 65,520 | ceil(K/16) u S |
| `fp8` | 16-bit operands are rounded to e4m3 times one power of two per tensor | 2^-3 S + u \|s\|; an operand below 2^-13 of its tensor's largest has an error of up to 2^-17 of that |

All variants change products, sums and means of float32, bfloat16 and float16 on the CPU, but not
float64 and integers. A product with K = 1 sums nothing and stays exact (rotary phases are computed this
way). A bias is added to the finished product and rounded once more. In float32, `fp16acc` and `fp8` leave
products unchanged, as accelerators do; `truncate` sums in float64. Only `split2`, `split4` and `truncate`
change sums and means. `scaled_dot_product_attention` runs in float32, with its two products computed as
above, and is rounded once, as fused kernels do. Norms, softmax and convolutions are torch's own. torch
compiles nothing: a compiled model runs operation by operation.
"""

from dataclasses import dataclass
from typing import Literal

from assay.devices.base import make_variant_error

DEFAULT_VARIANT = "split4"


@dataclass(frozen=True, slots=True)
class Numerics:
    """The parameters of one variant."""

    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    """The dtypes that a model can run in."""
    num_parts: int = 1
    """Number of parts of a sum; each is rounded to the dtype of the operation."""
    part_length: int | None = None
    """Terms in each part; overrides `num_parts`."""
    operands: Literal["tf32", "float8_e4m3fn"] | None = None
    """Format to which operands of products are rounded."""
    rounding: Literal["nearest", "zero"] = "nearest"

    def operands_in(self, dtype: str) -> str:
        """Return the format to which operands of a product in `dtype` are rounded.

        TF32 applies only to float32, e4m3 only to 16-bit dtypes.
        """
        is_float32 = dtype == "float32"
        rounds = self.operands is not None and (self.operands == "tf32") == is_float32
        return self.operands if rounds and self.operands else dtype


VARIANTS = {
    "split2": Numerics(num_parts=2),
    "split4": Numerics(num_parts=4),
    "truncate": Numerics(rounding="zero"),
    "tf32": Numerics(operands="tf32"),
    "fp16acc": Numerics(dtypes=("float16",), part_length=16),
    "fp8": Numerics(dtypes=("bfloat16", "float16"), operands="float8_e4m3fn"),
}


def numerics_of(variant: str) -> Numerics:
    """Return the numerics called `variant`, the default for "". Raises: UsageError."""
    try:
        return VARIANTS[variant or DEFAULT_VARIANT]
    except KeyError:
        raise make_variant_error("sim", variant, tuple(VARIANTS)) from None
