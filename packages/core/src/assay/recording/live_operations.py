"""Recording the results of operations (aten) while a script runs."""

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch._ops import OpOverload

from assay.hooks.module_tracer import ModuleTracer, is_in_backward
from assay.hooks.operation_watcher import OperationWatcher
from assay.hooks.suspension import suspended
from assay.recording.live import LiveRecorder
from assay.recording.operation_names import operation_name
from assay.recording.operations import read_results
from assay.sites import CallSite


@dataclass
class OperationTap(OperationWatcher):
    """Adds the results of each operation to the module call whose code runs it.

    An operation has the port `op.INDEX.NAME.output`, where INDEX counts operations of that name in the call.
    """

    tracer: ModuleTracer
    recorder: LiveRecorder
    _site: CallSite | None = field(default=None, init=False)
    _counts: dict[CallSite, Counter[str]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    __hash__ = object.__hash__

    def after_operation(self, func: OpOverload, result: object) -> None:
        """Record the results. Backward and recomputation are left out."""
        active = self.tracer.active
        if active is None or self.tracer.paused or is_in_backward():
            return
        if not (results := read_results(func, result)):
            return
        site = active.call.site
        if active.call.caller is None and site != self._site:
            self._counts.clear()
            self._site = site
        name = operation_name(func)
        number = self._counts.setdefault(site, Counter())[name]
        self._counts[site][name] += 1
        with suspended():
            for index, tensor in enumerate(results):
                port = f"op.{number}.{name}.output" + (f".{index}" if len(results) > 1 else "")
                self.recorder.add_port(active, port, tensor.detach())


def find_compiled_modules(model: torch.nn.Module) -> list[str]:
    """Return the paths of compiled modules, whose operations do not run one by one."""
    return [
        path or "the model"
        for path, module in model.named_modules()
        if module._compiled_call_impl is not None  # noqa: SLF001 - there is no public name
        or isinstance(module, torch._dynamo.OptimizedModule)  # noqa: SLF001
    ]
