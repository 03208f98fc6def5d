"""Recording of training: optimizer steps, gradients, parameters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from assay.hooks.values.nested import iterate_tensors
from assay.recording.background import BackgroundWriter, Kept
from assay.recording.selection import Selection
from assay.sites import Call, CallSite, unwrapped_path


def is_in_backward() -> bool:
    """Return True while autograd runs: forward calls are then those of activation checkpointing."""
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001 - there is no public name


@contextmanager
def optimizer_steps(
    model: nn.Module, before: Callable[[], None], after: Callable[[], None]
) -> Iterator[None]:
    """Inside, call `before` and `after` around each step of an optimizer of the model's parameters."""
    parameters = set(map(id, model.parameters()))

    def concerns(optimizer: Optimizer) -> bool:
        return any(
            id(one) in parameters for group in optimizer.param_groups for one in group["params"]
        )

    def run(action: Callable[[], None]) -> Callable[..., None]:
        return lambda optimizer, *_: action() if concerns(optimizer) else None

    hooks = (
        register_optimizer_step_pre_hook(run(before)),
        register_optimizer_step_post_hook(run(after)),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class GradientWriter:
    """Writes the gradients that arrive at the results of calls, after each backward pass.

    Of several backward passes through one forward pass, the first is written.
    """

    writer: BackgroundWriter
    _written: set[CallSite] = field(default_factory=set)
    _arrived: dict[CallSite, tuple[Call, dict[str, Kept]]] = field(default_factory=dict)

    def watch(self, call: Call, output: Any) -> None:  # noqa: ANN401 - whatever modules return
        """Wait for the gradients of a call's results."""
        for port, tensor in iterate_tensors(output, "output"):
            if tensor.requires_grad:
                tensor.register_hook(self._make_hook(call, port))

    def _make_hook(self, call: Call, port: str) -> Callable[[Tensor], None]:
        def arrive(gradient: Tensor) -> None:
            if not self._arrived:
                torch.autograd.Variable._execution_engine.queue_callback(self._write)  # noqa: SLF001
            # The engine may add other gradients to this tensor.
            self._arrived.setdefault(call.site, (call, {}))[1][port] = self.writer.keep(gradient)

        return arrive

    def _write(self) -> None:
        for site, (call, gradients) in self._arrived.items():
            if site not in self._written:
                self._written.add(site)
                self.writer.add(replace(call, site=site.backward, constants={}), gradients)
        self._arrived.clear()
        self.writer.flush()


def attach_parameters(
    writer: BackgroundWriter, model: nn.Module, selection: Selection, step: int
) -> None:
    """Write the parameters with which a step began, and their gradients, if there are any."""
    rows: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    for path, parameter in model.named_parameters():
        module, _, name = path.rpartition(".")
        if not selection.has_module(unwrapped_path(module)):
            continue
        values = {("forward", "parameter"): parameter, ("backward", "gradient"): parameter.grad}
        for (phase, kind), value in values.items():
            if value is not None:
                key = f"{kind}.{path}"
                tensors[key] = value.detach()
                rows.append(
                    {"module": unwrapped_path(module), "port": f"{kind}.{name}", "phase": phase,
                     "index": 0, "tensor": key}
                )  # fmt: skip
    writer.attach(f"step-{step}", tensors, {"values": rows})
