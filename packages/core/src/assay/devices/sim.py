r"""A simulated accelerator: the host's processor with an accelerator's rounding and order of sums.

Everything in assay except performance can be tested on it. Its variants and their error bounds:

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

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from assay.devices.base import (
    Detection,
    Device,
    DeviceVendor,
    execution_suspended,
    make_variant_error,
)
from assay.devices.cpu import CpuDevice
from assay.dtypes import float_format

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


_INTEGER_OF = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
_E4M3_LARGEST = float_format("float8_e4m3fn").largest

# The scale and its inverse must both be normal numbers of float32, or products would underflow.
_SMALLEST_SCALE_EXPONENT = -126

# TF32 stores the upper 10 of the 23 significand bits of float32.
_TF32_DROPPED_BITS = 13


def round_toward_zero(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the narrower `dtype` without increasing the magnitude.

    A magnitude above the largest number becomes that number. Infinities and NaN stay.
    """
    nearest = values.to(dtype)
    grew = nearest.to(values.dtype).abs() > values.abs()
    # In sign-magnitude formats the next smaller magnitude is the next smaller integer.
    bits = nearest.view(_INTEGER_OF[dtype])
    return (bits - grew.to(bits.dtype)).view(dtype)


def round_to_tf32(values: Tensor) -> Tensor:
    """Round float32 values to the 11 significand bits of TF32, ties to even."""
    bits = values.view(torch.int32)
    half = (1 << (_TF32_DROPPED_BITS - 1)) - 1
    odd = (bits >> _TF32_DROPPED_BITS) & 1
    rounded = (bits + half + odd) & -(1 << _TF32_DROPPED_BITS)
    return torch.where(values.isfinite(), rounded.view(torch.float32), values)


def round_to_scaled_e4m3(values: Tensor) -> Tensor:
    """Round to e4m3 numbers times one power of two for the whole tensor; return float32.

    The scale is the smallest power of two, at least 2^-126, that brings the largest finite magnitude
    to at most 448, so the rounding is idempotent. Infinities and NaN stay.
    """
    values = values.float()
    largest = float(values.abs().max()) if values.numel() else 0.0
    if not math.isfinite(largest):
        finite = values.isfinite()
        return torch.where(finite, round_to_scaled_e4m3(values.where(finite, 0.0)), values)
    fraction, exponent = math.frexp(largest / _E4M3_LARGEST)
    # frexp returns a fraction in [0.5, 1); 0.5 stands for a power of two.
    exponent = max(exponent - (fraction == 0.5), _SMALLEST_SCALE_EXPONENT)  # noqa: PLR2004
    scaled = (values * math.ldexp(1.0, -exponent)).to(torch.float8_e4m3fn)
    return scaled.float() * math.ldexp(1.0, exponent)


_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
SIMULATED_DTYPES = frozenset(_NAMES)


class Arithmetic:
    """The matrix products and sums of one variant."""

    def __init__(self, numerics: Numerics) -> None:
        self._numerics = numerics

    def multiply(self, left_BMK: Tensor, right_BKN: Tensor) -> Tensor:
        """Compute the matrix product in the dtype of its operands."""
        num_terms = left_BMK.shape[-1]
        dtype = left_BMK.dtype
        if num_terms <= 1:
            return torch.matmul(left_BMK, right_BKN)
        left, right = self._operand(left_BMK), self._operand(right_BKN)
        length = self._length_of_part(num_terms, dtype)
        wide = self._wide_dtype(dtype)
        parts = (
            torch.matmul(
                left[..., start : start + length].to(wide),
                right[..., start : start + length, :].to(wide),
            )
            for start in range(0, num_terms, length)
        )
        return self._add_parts(parts, dtype)

    def multiply_add(
        self, bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        """Add alpha * left @ right and beta * bias; round after the product and at the end."""
        product = self.multiply(left, right)
        wide = self._wide_dtype(product.dtype)
        total = product.to(wide) * alpha
        if beta:
            total = total + bias.to(wide) * beta
        return self._round(total, product.dtype)

    def add_up(self, values: Tensor, dims: list[int], *, keepdim: bool) -> Tensor:
        """Sum over `dims`, or over all dims for an empty list, in the dtype of `values`."""
        dims = _counted_from_zero(dims, values.ndim)
        dtype = values.dtype
        kept = [dim for dim in range(values.ndim) if dim not in dims]
        shape = [1 if dim in dims else size for dim, size in enumerate(values.shape)]
        num_terms = math.prod(values.shape[dim] for dim in dims)
        rows = values.permute([*kept, *dims])
        rows = rows.reshape([*(values.shape[dim] for dim in kept), num_terms])
        wide = self._wide_dtype(dtype)
        length = self._length_of_part(num_terms, dtype)
        parts = (
            rows[..., start : start + length].to(wide).sum(-1)
            for start in range(0, max(1, num_terms), length)
        )
        total = self._add_parts(parts, dtype)
        return total.reshape(shape) if keepdim else total

    def average(self, values: Tensor, dims: list[int], *, keepdim: bool) -> Tensor:
        """Divide the sum over `dims` by the number of terms, and round once more."""
        total = self.add_up(values, dims, keepdim=keepdim)
        count = math.prod(values.shape[dim] for dim in _counted_from_zero(dims, values.ndim))
        return self._round(total.to(self._wide_dtype(total.dtype)) / count, total.dtype)

    @property
    def changes_sums(self) -> bool:
        """Return True if sums and means differ from the host's, and not only matrix products."""
        return self._numerics.num_parts > 1 or self._numerics.rounding == "zero"

    def _length_of_part(self, num_terms: int, dtype: torch.dtype) -> int:
        """Return the terms in each part of a sum; the last part may have fewer."""
        numerics = self._numerics
        if numerics.part_length is not None:
            return num_terms if dtype is torch.float32 else numerics.part_length
        return max(1, -(-num_terms // numerics.num_parts))

    def _wide_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if self._numerics.rounding == "zero" and dtype is torch.float32:
            return torch.float64
        return torch.float32

    def _operand(self, values: Tensor) -> Tensor:
        format_name = self._numerics.operands_in(_NAMES[values.dtype])
        if format_name == "tf32":
            return round_to_tf32(values)
        if format_name == "float8_e4m3fn":
            return round_to_scaled_e4m3(values)
        return values

    def _round(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        if self._numerics.rounding == "zero":
            return round_toward_zero(values, dtype)
        return values.to(dtype)

    def _add_parts(self, parts: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
        return functools.reduce(torch.add, (self._round(part, dtype) for part in parts))


def _counted_from_zero(dims: list[int], num_dims: int) -> list[int]:
    """Return `dims` counted from 0; all dims for an empty list or a tensor without dims."""
    if not dims or not num_dims:
        return list(range(num_dims))
    return sorted(dim % num_dims for dim in dims)


def grouped_multiply(
    arithmetic: Arithmetic,
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `torch.nn.functional.grouped_mm` for its four combinations of shapes.

    TK by GKN, GMK by KT, MT by TN (a sum over each group, so GMN), and GMK by GKN.
    Rows after the last group are zero.
    """
    if offs is None:
        product = arithmetic.multiply(left, right)
    elif left.ndim == right.ndim:
        product = left.new_zeros(offs.numel(), left.shape[0], right.shape[1])
        for group, rows in _groups(offs):
            product[group] = arithmetic.multiply(left[:, rows], right[rows])
    elif left.ndim < right.ndim:
        product = left.new_zeros(left.shape[0], right.shape[2])
        for group, rows in _groups(offs):
            product[rows] = arithmetic.multiply(left[rows], right[group])
    else:
        product = left.new_zeros(left.shape[1], right.shape[1])
        for group, rows in _groups(offs):
            product[:, rows] = arithmetic.multiply(left[group], right[:, rows])
    if bias is not None:
        product = product + bias
    return product if out_dtype is None else product.to(out_dtype)


def grouped_multiply_backward(
    arithmetic: Arithmetic, left_TK: Tensor, right_GKN: Tensor, offs: Tensor, gradient_TN: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of both operands of TK by GKN from the product's gradient."""
    return (
        grouped_multiply(arithmetic, gradient_TN, right_GKN.transpose(1, 2), offs),
        grouped_multiply(arithmetic, left_TK.T, gradient_TN, offs),
    )


def _groups(offsets_G: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for group, end in enumerate(offsets_G.tolist()):
        yield group, slice(start, end)
        start = end


Operation = Callable[..., Any]


@contextmanager
def simulated_execution(arithmetic: Arithmetic) -> Iterator[None]:
    """Replace products and sums of model code by those of `arithmetic` inside the context.

    Attention runs as products and a softmax, because the CPU's fused kernel hides its products.
    """
    with sdpa_kernel([SDPBackend.MATH]), ReplacedProducts(arithmetic):
        yield


class ReplacedProducts(TorchDispatchMode):
    """Replaces products and sums outside of fused kernels by those of `arithmetic`.

    It runs below autograd, so that gradients are simulated too.
    """

    def __init__(self, arithmetic: Arithmetic) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations = _operations(arithmetic)

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        # DTensor plans a product with fake tensors, which compute only shapes.
        if execution_suspended() or FakeTensor in types:
            return func(*args, **kwargs)
        if any(_has_own_dispatch(kind) for kind in types):
            # A tensor subclass calls the operation again on its wrapped tensors.
            return NotImplemented
        operation = self._operations.get(_name(func))
        if operation is not None and _is_simulated(args, kwargs):
            return operation(*args, **kwargs)
        if _hides_products(func):
            with self:
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)


# Under inference mode composite operations arrive undivided. These frequent ones only move or cast data.
_COMPOSITE_WITHOUT_SUMS = frozenset(
    {
        "aten::to.dtype", "aten::to.device", "aten::to.dtype_layout", "aten::to.other",
        "aten::reshape", "aten::contiguous", "aten::flatten.using_ints", "aten::chunk",
        "aten::expand_as", "aten::split.Tensor", "aten::type_as", "aten::numpy_T",
        "aten::repeat_interleave.self_int", "aten::item", "aten::is_nonzero",
    }
)  # fmt: skip


@functools.cache
def _name(func: torch._ops.OpOverload) -> str:
    return str(func.name())


@functools.cache
def _hides_products(func: torch._ops.OpOverload) -> bool:
    name = _name(func)
    return name not in _COMPOSITE_WITHOUT_SUMS and (
        torch._C._dispatch_has_kernel_for_dispatch_key(  # noqa: SLF001 - no public function
            name, "CompositeImplicitAutograd"
        )
    )


@functools.cache
def _has_own_dispatch(kind: type) -> bool:
    return getattr(kind, "__torch_dispatch__", None) is not getattr(
        Tensor, "__torch_dispatch__", None
    )


def _is_simulated(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if all operands are on the host and have simulated dtypes, as has the result."""
    tensors = [arg for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()]
    dtypes = {tensor.dtype for tensor in tensors}
    wanted = kwargs.get("dtype") or next(iter(dtypes), None)
    return (
        len(dtypes) == 1
        and dtypes <= SIMULATED_DTYPES
        and wanted in SIMULATED_DTYPES
        and all(tensor.device.type == "cpu" for tensor in tensors)
    )


def _operations(arithmetic: Arithmetic) -> dict[str, Operation]:
    multiply, multiply_add = arithmetic.multiply, arithmetic.multiply_add
    operations: dict[str, Operation] = {
        "aten::mm": multiply,
        "aten::bmm": multiply,
        "aten::mv": lambda left, right: multiply(left, right[:, None])[:, 0],
        "aten::dot": lambda left, right: multiply(left[None], right[:, None])[0, 0],
        "aten::addmm": multiply_add,
        "aten::baddbmm": multiply_add,
        "aten::addmv": lambda bias, left, right, **scales: multiply_add(
            bias[..., None], left, right[:, None], **scales
        )[:, 0],
        "aten::_grouped_mm": functools.partial(grouped_multiply, arithmetic),
        "transformers::grouped_mm_fallback": functools.partial(grouped_multiply, arithmetic),
        "transformers::grouped_mm_fallback_backward": functools.partial(
            grouped_multiply_backward, arithmetic
        ),
    }
    if arithmetic.changes_sums:
        operations |= {
            "aten::sum": _reduction(arithmetic.add_up),
            "aten::sum.dim_IntList": _reduction(arithmetic.add_up),
            "aten::mean": _reduction(arithmetic.average),
            "aten::mean.dim": _reduction(arithmetic.average),
        }
    return operations


def _reduction(reduce: Callable[..., Tensor]) -> Operation:
    def call(
        values: Tensor,
        dims: Sequence[int] | None = None,
        keepdim: bool = False,  # noqa: FBT001, FBT002 - the signature of aten::sum
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        if dtype is not None and dtype is not values.dtype:
            values = values.to(dtype)
        return reduce(values, list(dims or ()), keepdim=keepdim)

    return call


SIM = DeviceVendor(
    name="sim",
    title="simulated device",
    distributed_backend="gloo",
    compile_backend="eager",
    runner_labels=("assay-cpu",),
    verified="x86_64",
)


class SimDevice(CpuDevice):
    """The host's processor with the products and sums of a variant in `VARIANTS`.

    Memory, seeds and versions are the host's. The compile backend is "eager" because compiled code
    would fuse the simulated operations.
    """

    vendor = SIM

    def __init__(self, variant: str = "") -> None:
        self._numerics = numerics_of(variant)
        self._variant = variant or DEFAULT_VARIANT
        self.name = f"sim:{variant}" if variant else "sim"

    @classmethod
    def detect(cls) -> tuple[Detection, ...]:
        """Return one device with all variants; it is always present."""
        return (Detection(SIM, products=("simulated on the CPU",), variants=tuple(VARIANTS)),)

    def product(self) -> str:
        """Return the variant and the host's processor."""
        return f"{self._variant} on {super().product()}"

    def architecture(self) -> str:
        """Return the variant, which affects the numbers most."""
        return f"sim-{self._variant}"

    def supported_dtypes(self) -> tuple[str, ...]:
        """Return the dtypes of the variant. None has float64, like most accelerators."""
        return self._numerics.dtypes

    def effective_precision(self, dtype: str) -> str:
        """Return the format to which the variant rounds operands, otherwise `dtype`."""
        return self._numerics.operands_in(dtype)

    def execution(self) -> AbstractContextManager[None]:
        """Compute products and sums as the variant does inside the context, forward and backward."""
        return simulated_execution(Arithmetic(self._numerics))


# In a smaller model, Python takes a large part of the time, and a replaced operation takes more of it.
_FEWEST_PARAMETERS = 20_000_000


def trusted_device(device: Device, dtype: str, num_parameters: int) -> Device:
    """Return `device`, or a faster one with the same rounding, for a trusted run in `dtype`."""
    if (
        type(device) is CpuDevice
        and float_format(dtype).is_narrow
        and num_parameters >= _FEWEST_PARAMETERS
        # AVX-512 has instructions that oneDNN uses. Other processors were not measured.
        and torch.backends.cpu.get_cpu_capability() == "AVX2"
    ):
        return _Float32Products()
    return device


class _Float32Products(CpuDevice):
    """The host's processor, with products of 16-bit numbers computed in float32 and rounded once.

    torch's own kernels round once, too, but are slow without instructions for the dtype.
    """

    def execution(self) -> AbstractContextManager[None]:
        """Replace products by those in float32 inside the context."""
        return ReplacedProducts(Arithmetic(Numerics()))
