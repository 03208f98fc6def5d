"""Finding the modules whose own code adds nothing up."""

from collections import defaultdict

from torch._ops import OpOverload

from assay.hooks.module_tracer import ModuleTracer
from assay.hooks.operation_watcher import OperationWatcher
from assay.recording.operation_names import is_pointwise


class PointwiseModules(OperationWatcher):
    """Watches a run of a model, entered with its tracer: which modules have pointwise code alone."""

    def __init__(self, tracer: ModuleTracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer = tracer
        self._pointwise: dict[str, bool] = defaultdict(lambda: True)

    @property
    def paths(self) -> frozenset[str]:
        """Paths of the modules that ran only pointwise operations of their own."""
        return frozenset(name for name, pointwise in self._pointwise.items() if pointwise)

    def after_operation(self, func: OpOverload, result: object) -> None:
        """Called after each operation: one that is not pointwise rules its module out."""
        del result
        if self._tracer.current is not None:
            self._pointwise[self._tracer.current] &= is_pointwise(func)
