"""The torch dispatch mode that replaces the host's products and sums with a variant's."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from assay.devices.base import execution_suspended
from assay.devices.sim.arithmetic import (
    SIMULATED_DTYPES,
    Arithmetic,
    grouped_multiply,
    grouped_multiply_backward,
)

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
        torch._C._dispatch_has_kernel_for_dispatch_key(  # noqa: SLF001 - there is no public way
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
