"""Records the values between the phases of training steps in a trace."""

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
    # By module, port and index: the injected value, and the address of the value it was rounded from.
    _injected: dict[tuple[str, str, int], tuple[Tensor, ValueAddress]] = field(default_factory=dict)

    def begin_step(self, step: int) -> None:
        """Discard the values of an unfinished step."""
        self._step = step
        self._values = StepValues()
        self._injected.clear()

    def observe(self, address: ValueAddress, value: Tensor) -> Tensor:
        """Store the value, and return it rounded."""
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
        """Raise NotImplementedError: the reference runs each micro-batch separately."""
        raise NotImplementedError

    def observe_state(self, name: str, state: Tensor) -> Tensor:
        """Store the state, and return it."""
        self._values.states[name] = state
        return state

    def find(self, address: ValueAddress) -> None:
        """Return None: there is no reference while it is recorded."""

    def expected(self, phase: Phase) -> tuple[ValueAddress, ...]:
        """Return no addresses: there is no reference while it is recorded."""
        del phase
        return ()

    def end_step(self) -> None:
        """Write the step."""
        self._values.write(self.writer, self._step)
        self.begin_step(self._step)
