"""Finding the modules whose own code adds nothing up."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from assay.hooks.module_tracer import ModuleTracer
from assay.hooks.suspension import is_suspended
from assay.recording.operation_names import is_pointwise


class PointwiseModules(TorchDispatchMode):
    """Watches a run of a model, entered with its tracer: which modules have pointwise code alone."""

    def __init__(self, tracer: ModuleTracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer = tracer
        self._pointwise: dict[str, bool] = defaultdict(lambda: True)

    @property
    def paths(self) -> frozenset[str]:
        """Paths of the modules that ran only pointwise operations of their own."""
        return frozenset(name for name, pointwise in self._pointwise.items() if pointwise)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        del types
        if not is_suspended() and self._tracer.current is not None:
            self._pointwise[self._tracer.current] &= is_pointwise(func)
        return func(*args, **(kwargs or {}))
