"""Operations (aten) of modules: their results, and modules that compute no sums."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from assay.hooks.module_tracer import ActiveCall, ModuleTracer
from assay.hooks.suspension import is_suspended, suspended
from assay.recording.operation_names import is_pointwise, operation_name


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
    """An operation that ran: its canonical name, overload, and results."""

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
        with suspended():
            if results := read_results(func, result):
                tensors = tuple(item.detach().cpu().clone() for item in results)
                self.operations.append(Operation(operation_name(func), str(func), tensors))


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
