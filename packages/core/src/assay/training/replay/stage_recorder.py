"""Recording the values between the phases of training steps into a trace."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from assay.hooks.suspension import suspended
from assay.hooks.values.boundary import Boundary
from assay.sites import Phase
from assay.trace import TraceWriter
from assay.training.replay.stage_values import StepValues, ValueAddress


@dataclass
class StageRecorder:
    """A handler that attaches the values of each step to a trace."""

    writer: TraceWriter
    boundary: Boundary
    _step: int = 0
    _values: StepValues = field(default_factory=StepValues)
    # By module, port and index the injected value, and the address of the one it was made from.
    _injected: dict[tuple[str, str, int], tuple[Tensor, ValueAddress]] = field(default_factory=dict)

    def begin_step(self, step: int) -> None:
        """Forget what an unfinished step left."""
        self._step = step
        self._values = StepValues()
        self._injected.clear()

    def observe(self, address: ValueAddress, value: Tensor) -> Tensor:
        """Keep the value, and return it rounded."""
        name = (address.stage.module, address.port, address.index)
        with suspended():
            if name in self._injected:
                injected, source = self._injected[name]
                if torch.equal(injected, value):
                    self._values.unchanged[address] = source
                    return injected
            stored = self.boundary.store(value.detach())
            self._values.stored[address] = stored
            if not value.is_floating_point():
                return value
            injected = self.boundary.injected(stored, value.dtype)
            self._injected[name] = injected, address
            return injected

    def observe_sum(self, addresses: Sequence[ValueAddress], value: Tensor) -> None:
        """Refuse it: the reference runs every micro-batch by itself."""
        raise NotImplementedError

    def observe_state(self, name: str, state: Tensor) -> Tensor:
        """Keep the state, and return it."""
        self._values.states[name] = state
        return state

    def find(self, address: ValueAddress) -> None:
        """Find nothing: it is being recorded."""

    def expected(self, phase: Phase) -> tuple[ValueAddress, ...]:
        """No addresses: what is recorded is measured against nothing."""
        del phase
        return ()

    def end_step(self) -> None:
        """Write the step."""
        self._values.write(self.writer, self._step)
        self.begin_step(self._step)
