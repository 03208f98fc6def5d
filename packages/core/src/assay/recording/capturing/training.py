"""Recording training: optimizer steps, gradients, parameters."""

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
from assay.recording.capturing.background import BackgroundWriter, QueuedTensor
from assay.recording.capturing.capture_filter import CaptureFilter
from assay.recording.capturing.local_parts import take_local
from assay.sites import Call, CallSite, Phase, unwrapped_path


@contextmanager
def optimizer_steps(
    model: nn.Module, before: Callable[[], None], after: Callable[[], None]
) -> Iterator[None]:
    """Call `before` and `after` around each step of an optimizer of the model's parameters."""
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
    """Writes the gradients of the results of calls, at the first backward pass through them."""

    writer: BackgroundWriter
    finish_backward: Callable[[], None]
    """Runs at the end of each backward pass, when parameters have their gradients."""
    _written: set[CallSite] = field(default_factory=set)
    _arrived: dict[CallSite, tuple[Call, dict[str, QueuedTensor]]] = field(default_factory=dict)

    def watch(self, call: Call, output: Any) -> None:  # noqa: ANN401 - whatever modules return
        """Record the gradients of a call's results when they arrive."""
        for port, tensor in iterate_tensors(output, "output"):
            if tensor.requires_grad:
                tensor.register_hook(self._make_hook(call, port))

    def _make_hook(self, call: Call, port: str) -> Callable[[Tensor], None]:
        def arrive(gradient: Tensor) -> None:
            if not self._arrived:
                _call_after_backward(self._write)
            # A copy now: the engine may add other gradients to this tensor.
            self._arrived.setdefault(call.site, (call, {}))[1][port] = self.writer.keep(gradient)

        return arrive

    def _write(self) -> None:
        for site, (call, gradients) in self._arrived.items():
            if site not in self._written:
                self._written.add(site)
                self.writer.add(replace(call, site=site.backward, constants={}), gradients)
        self._arrived.clear()
        self.writer.flush()
        # Callbacks of DistributedDataParallel and FSDP, which reduce gradients, may follow this one.
        _call_after_backward(self.finish_backward)


def _call_after_backward(action: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(action)  # noqa: SLF001 - see autograd


@dataclass
class ParameterWriter:
    """Writes the parameters of modules, and their gradients before and after clipping."""

    writer: BackgroundWriter
    model: nn.Module
    filter: CaptureFilter
    _unclipped: dict[str, Tensor] = field(default_factory=dict)

    def keep_gradients(self) -> None:
        """Keep the gradients after backward, on the host, before they are clipped."""
        self._unclipped = {
            path: take_local(parameter.grad).value.to("cpu", copy=True)
            for path, parameter in self._parameters()
            if parameter.grad is not None
        }

    def write(self, step: int) -> None:
        """Write the parameters at the beginning of a step, and their gradients, if there are any."""
        rows: list[dict[str, Any]] = []
        tensors: dict[str, Tensor] = {}

        def add(path: str, phase: Phase, key: str, layout: str) -> None:
            module, _, name = path.rpartition(".")
            kind = "parameter" if phase == "forward" else "gradient"
            rows.append(
                {"module": unwrapped_path(module), "port": f"{kind}.{name}", "phase": phase,
                 "index": 0, "tensor": f"{key}.{path}", "layout": layout}
            )  # fmt: skip

        for path, parameter in self._parameters():
            part = self.writer.take_local(parameter)
            if part.problem:
                continue
            tensors[f"parameter.{path}"] = part.value
            add(path, "forward", "parameter", part.layout)
            if parameter.grad is None:
                continue
            gradient = self.writer.take_local(parameter.grad)
            if gradient.problem:
                continue
            clipped, layout = gradient.value, gradient.layout
            unclipped = self._unclipped.get(path, clipped)
            tensors[f"gradient.{path}"] = unclipped
            add(path, "backward", "gradient", layout)
            if unclipped is clipped or torch.equal(unclipped, clipped.to(unclipped.device)):
                add(path, "clip", "gradient", layout)
            else:
                tensors[f"clipped.{path}"] = clipped
                add(path, "clip", "clipped", layout)
        self._unclipped.clear()
        self.writer.attach(f"step-{step}", tensors, {"values": rows})

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for path, parameter in self.model.named_parameters():
            if self.filter.has_module(unwrapped_path(path.rpartition(".")[0])):
                yield path, parameter
