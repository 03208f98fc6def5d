"""Operations (aten) inside modules: which there are, and what they computed."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from assay.hooks.module_tracer import ModuleTracer
from assay.hooks.suspension import is_suspended, suspended

# Operations that move or make values without computing: they do not round.
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

# Names under which one computation arrives, by the name that a reader would look for.
_CANONICAL = {
    "mm": "linear",
    "addmm": "linear",
    "linear": "linear",
    "mkldnn_linear": "linear",
    "_scaled_dot_product_flash_attention_for_cpu": "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_efficient_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_cudnn_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_attention_math": "scaled_dot_product_attention",
    "_fused_sdp_choice": "scaled_dot_product_attention",
    "bmm": "matmul",
    "baddbmm": "matmul",
    "_softmax": "softmax",
    "_safe_softmax": "softmax",
    "_grouped_mm": "grouped_mm",
}


def operation_name(func: OpOverload) -> str:
    """The canonical name of an aten operation, without overload: `aten.mm.default` is linear."""
    name: str = func._schema.name.rpartition("::")[2]  # noqa: SLF001 - the public name is the same text
    name = name.rstrip("_") or name
    return _CANONICAL.get(name, name)


def is_pointwise(func: OpOverload) -> bool:
    """Whether every output element depends on one element of each input, and is rounded once."""
    name = func._schema.name.rpartition("::")[2]  # noqa: SLF001
    return torch.Tag.pointwise in func.tags or name in MOVING or func.is_view


class OperationWatcher(TorchDispatchMode):
    """Runs every operation as it is, and then shows it to `after_operation`."""

    def after_operation(self, func: OpOverload, result: object) -> None:
        """Called after each operation that is not the watchers' own."""
        raise NotImplementedError

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """As torch calls it."""
        del types
        result: object = func(*args, **(kwargs or {}))
        if not is_suspended():
            self.after_operation(func, result)
        return result


class PointwiseStages(OperationWatcher):
    """Finds the modules whose own code adds nothing up: all its operations are pointwise."""

    def __init__(self, tracer: ModuleTracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer = tracer
        self._pointwise: dict[str, bool] = defaultdict(lambda: True)

    @property
    def modules(self) -> frozenset[str]:
        """Paths of the modules that ran and are pointwise."""
        return frozenset(name for name, pointwise in self._pointwise.items() if pointwise)

    def after_operation(self, func: OpOverload, result: object) -> None:
        """Called after each operation: one that is not pointwise rules its module out."""
        del result
        if self._tracer.current is not None:
            self._pointwise[self._tracer.current] &= is_pointwise(func)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation that ran: its canonical name, overload, and what it gave."""

    name: str
    overload: str
    outputs: tuple[Tensor, ...]


@dataclass
class OperationRecorder(OperationWatcher):
    """Keeps what every operation of one module's own code gave, in chosen calls.

    wanted: (module path, step, call) of the calls to record.
    """

    tracer: ModuleTracer
    wanted: tuple[str, int, int]
    operations: list[Operation] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    __hash__ = object.__hash__

    def after_operation(self, func: OpOverload, result: object) -> None:
        """Called after each operation: keeps what it gave, if it is one of the wanted calls."""
        if self.tracer.current_call == self.wanted:
            with suspended():
                self._keep(func, result)

    def _keep(self, func: OpOverload, result: object) -> None:
        if func.is_view:
            return
        outputs = result if isinstance(result, tuple | list) else (result,)
        tensors = tuple(
            item.detach().cpu().clone()
            for item in outputs
            if isinstance(item, Tensor) and item.is_floating_point()
        )
        if tensors:
            self.operations.append(Operation(operation_name(func), str(func), tensors))
