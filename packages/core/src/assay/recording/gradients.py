"""Recording the gradients at module boundaries into a trace."""

from dataclasses import dataclass, field, replace

from torch import Tensor

from assay.hooks.values.boundary import Boundary
from assay.sites import Call, CallSite
from assay.trace import TraceWriter


@dataclass
class GradientRecorder:
    """Writes the gradients at all boundaries, as calls of the phase `backward`."""

    writer: TraceWriter
    boundary: Boundary
    _arrived: dict[CallSite, tuple[Call, dict[str, Tensor]]] = field(default_factory=dict)

    def expects(self, call: Call, port: str, value: Tensor) -> bool:
        """Return True for every value with a gradient."""
        del call, port
        return value.requires_grad

    def announce(self, call: Call, port: str) -> None:
        """Do nothing: a gradient that never arrives is not written."""

    def begin_backward(self, gradient: Tensor) -> None:
        """Do nothing: the gradient of the loss is not written."""

    def arrive(self, call: Call, port: str, gradient: Tensor) -> Tensor:
        """Keep a gradient, and return the injected one."""
        stored = self.boundary.store(gradient.detach())
        self._arrived.setdefault(call.site, (call, {}))[1][port] = stored
        return self.boundary.injected(stored, gradient.dtype)

    def finish_backward(self) -> None:
        """Write the gradients."""
        for call, gradients in self._arrived.values():
            backward = replace(call, site=call.site.backward, ports=tuple(gradients))
            self.writer.add(backward, gradients)
        self._arrived.clear()
        self.writer.flush()
