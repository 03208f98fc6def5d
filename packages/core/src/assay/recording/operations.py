"""Recording what the operations (aten) of a module's own code computed."""

from dataclasses import dataclass, field

from torch import Tensor
from torch._ops import OpOverload

from assay.hooks.module_tracer import ModuleTracer
from assay.hooks.operation_watcher import OperationWatcher
from assay.hooks.suspension import suspended
from assay.recording.operation_names import operation_name


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation that ran: its canonical name, overload, and results."""

    name: str
    overload: str
    outputs: tuple[Tensor, ...]


@dataclass
class OperationRecorder(OperationWatcher):
    """Keeps the results of every operation of one module's own code, in one call.

    wanted: path, step and call of the module.
    """

    tracer: ModuleTracer
    wanted: tuple[str, int, int]
    operations: list[Operation] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    __hash__ = object.__hash__

    def after_operation(self, func: OpOverload, result: object) -> None:
        """Called after each operation: keeps its results, if it ran in the wanted call."""
        if self.tracer.current_call == self.wanted:
            with suspended():
                self._keep(func, result)

    def _keep(self, func: OpOverload, result: object) -> None:
        if results := read_results(func, result):
            tensors = tuple(item.detach().cpu().clone() for item in results)
            self.operations.append(Operation(operation_name(func), str(func), tensors))


def read_results(func: OpOverload, result: object) -> list[Tensor]:
    """Return the floating-point results of an operation; none of a view."""
    outputs = result if isinstance(result, tuple | list) else (result,)
    return [
        item
        for item in outputs
        if isinstance(item, Tensor) and item.is_floating_point() and not func.is_view
    ]
