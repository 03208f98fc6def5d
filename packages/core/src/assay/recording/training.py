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
from assay.recording.local_parts import take_local
from assay.recording.selection import Selection
from assay.sites import Call, CallSite, Phase, unwrapped_path


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
    finish_backward: Callable[[], None]
    """Called at the end of each backward pass, when parameters have their gradients."""
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
                _call_after_backward(self._write)
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
        # DistributedDataParallel and FSDP reduce gradients in callbacks that may follow this one.
        _call_after_backward(self.finish_backward)


def _call_after_backward(action: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(action)  # noqa: SLF001 - see autograd


@dataclass
class ParameterWriter:
    """Writes the parameters of the selected modules, with their gradients before and after clipping."""

    writer: BackgroundWriter
    model: nn.Module
    selection: Selection
    _unclipped: dict[str, Tensor] = field(default_factory=dict)

    def keep_gradients(self) -> None:
        """Called after backward: keep the gradients, on the host, before they are clipped."""
        self._unclipped = {
            path: take_local(parameter.grad).value.to("cpu", copy=True)
            for path, parameter in self._parameters()
            if parameter.grad is not None
        }

    def write(self, step: int) -> None:
        """Write the parameters with which a step began, and their gradients, if there are any."""
        rows: list[dict[str, Any]] = []
        tensors: dict[str, Tensor] = {}

        def add(path: str, phase: Phase, kind: str, key: str, layout: str) -> None:
            module, _, name = path.rpartition(".")
            rows.append(
                {"module": unwrapped_path(module), "port": f"{kind}.{name}", "phase": phase,
                 "index": 0, "tensor": key, "layout": layout}
            )  # fmt: skip

        for path, parameter in self._parameters():
            part = self.writer.take_local(parameter)
            if part.problem:
                continue
            tensors[f"parameter.{path}"] = part.value
            add(path, "forward", "parameter", f"parameter.{path}", part.layout)
            if parameter.grad is None:
                continue
            gradient = self.writer.take_local(parameter.grad)
            if gradient.problem:
                continue
            used, layout = gradient.value, gradient.layout
            made = self._unclipped.get(path, used)
            tensors[f"gradient.{path}"] = made
            add(path, "backward", "gradient", f"gradient.{path}", layout)
            is_clipped = made is not used and not torch.equal(made, used.to(made.device))
            if is_clipped:
                tensors[f"clipped.{path}"] = used
            add(
                path,
                "clip",
                "gradient",
                f"{'clipped' if is_clipped else 'gradient'}.{path}",
                layout,
            )
        self._unclipped.clear()
        self.writer.attach(f"step-{step}", tensors, {"values": rows})

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for path, parameter in self.model.named_parameters():
            if self.selection.has_module(unwrapped_path(path.rpartition(".")[0])):
                yield path, parameter
