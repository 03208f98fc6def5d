"""Operations (aten) of modules: their results, and modules that compute no sums."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from assay.hooks.module_tracer import ActiveCall, ModuleTracer
from assay.hooks.suspension import is_suspended, suspended

# Operations that move or create values without rounding.
MOVING = frozenset(
    # As text: forty names in quotes are hard to read.
    """view _unsafe_view reshape _reshape_alias t transpose permute expand slice select unsqueeze
    squeeze cat stack split split_with_sizes chunk unbind clone _to_copy copy_ copy detach alias
    lift_fresh contiguous index_select index gather embedding arange full zeros ones empty
    full_like zeros_like ones_like empty_like new_full new_zeros new_ones new_empty scalar_tensor
    empty_strided new_empty_strided fill_ fill zero_ narrow unfold repeat as_strided where
    masked_fill masked_fill_
    """.split()  # noqa: SIM905
)

ATTENTION = "scaled_dot_product_attention"

# The common name of aten operations that do one computation.
_CANONICAL = {
    "mm": "linear",
    "addmm": "linear",
    "linear": "linear",
    "mkldnn_linear": "linear",
    "_scaled_dot_product_flash_attention_for_cpu": ATTENTION,
    "_scaled_dot_product_flash_attention": ATTENTION,
    "_scaled_dot_product_efficient_attention": ATTENTION,
    "_scaled_dot_product_cudnn_attention": ATTENTION,
    "_scaled_dot_product_attention_math": ATTENTION,
    "_fused_sdp_choice": ATTENTION,
    "bmm": "matmul",
    "baddbmm": "matmul",
    "_softmax": "softmax",
    "_safe_softmax": "softmax",
    "_grouped_mm": "grouped_mm",
}


# The namespace of collectives, which return before they are done. Reading a result without waiting
# for it ends the process.
COLLECTIVES, WAIT = "_c10d_functional", "wait_tensor"


def operation_name(func: OpOverload) -> str:
    """Return the canonical name of an aten operation: `aten.mm.default` is linear."""
    name: str = func._schema.name.rpartition("::")[2]  # noqa: SLF001 - the public name is the same text
    name = name.rstrip("_") or name
    return _CANONICAL.get(name, name)


def is_pointwise(func: OpOverload) -> bool:
    """Return True if an output element depends on one element of each input, and is rounded once."""
    name = func._schema.name.rpartition("::")[2]  # noqa: SLF001
    return torch.Tag.pointwise in func.tags or name in MOVING or func.is_view


class OperationWatcher(TorchDispatchMode):
    """Shows every operation of a model to `after_operation`."""

    def __init__(self, tracer: ModuleTracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer = tracer

    def after_operation(self, active: ActiveCall, func: OpOverload, result: object) -> None:
        """Handle an operation of the module of `active`, not of its children."""
        raise NotImplementedError

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        del types
        result: object = func(*args, **(kwargs or {}))
        active = self._tracer.active
        if active is not None and not is_suspended():
            self.after_operation(active, func, result)
        return result


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation that ran: its canonical name, overload, and results.

    A collective has no results; those of `wait_tensor` are its own.
    """

    name: str
    overload: str
    outputs: tuple[Tensor, ...]


class OperationRecorder(OperationWatcher):
    """Keeps the results of the operations of one module in one call.

    wanted: path, step and call of the module.
    """

    def __init__(self, tracer: ModuleTracer, wanted: tuple[str, int, int]) -> None:
        super().__init__(tracer)
        self._wanted = wanted
        self.operations: list[Operation] = []

    def after_operation(self, active: ActiveCall, func: OpOverload, result: object) -> None:
        """Keep the results of an operation of the wanted call."""
        site = active.call.site
        if (site.module, site.step, site.call) != self._wanted:
            return
        name = operation_name(func)
        if func.namespace.startswith(COLLECTIVES) and name != WAIT:
            self.operations.append(Operation(name, str(func), ()))
            return
        with suspended():
            if results := read_results(func, result):
                tensors = tuple(item.detach().cpu().clone() for item in results)
                self.operations.append(Operation(name, str(func), tensors))


class PointwiseModules(OperationWatcher):
    """Finds the modules whose own operations are all pointwise. Enter it with its tracer."""

    def __init__(self, tracer: ModuleTracer) -> None:
        super().__init__(tracer)
        self._pointwise: dict[str, bool] = {}

    @property
    def paths(self) -> frozenset[str]:
        """Paths of the modules that ran only pointwise operations."""
        return frozenset(name for name, pointwise in self._pointwise.items() if pointwise)

    def after_operation(self, active: ActiveCall, func: OpOverload, result: object) -> None:
        """Exclude a module that runs another operation."""
        del result
        module = active.call.site.module
        self._pointwise[module] = self._pointwise.get(module, True) and is_pointwise(func)


def read_results(func: OpOverload, result: object) -> list[Tensor]:
    """Return the floating-point results of an operation; none of a view."""
    outputs = result if isinstance(result, tuple | list) else (result,)
    return [
        item
        for item in outputs
        if isinstance(item, Tensor) and item.is_floating_point() and not func.is_view
    ]
