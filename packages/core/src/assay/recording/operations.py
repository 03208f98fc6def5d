"""Recording what the operations (aten) of a module's own code computed."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from assay.hooks.module_tracer import ModuleTracer
from assay.hooks.suspension import is_suspended, suspended
from assay.recording.operation_names import operation_name


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation that ran: its canonical name, overload, and results."""

    name: str
    overload: str
    outputs: tuple[Tensor, ...]


@dataclass
class OperationRecorder(TorchDispatchMode):
    """Keeps the results of every operation of one module's own code, in one call.

    wanted: path, step and call of the module.
    """

    tracer: ModuleTracer
    wanted: tuple[str, int, int]
    operations: list[Operation] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    __hash__ = object.__hash__

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        del types
        result = func(*args, **(kwargs or {}))
        if is_suspended() or self.tracer.current_call != self.wanted:
            return result
        with suspended():
            self._keep(func, result)
        return result

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
