"""Values between the phases of a training step: gradients, norms, updates.

The result of a phase is stored exactly. Rounded to the candidate's dtype, it is injected into the next
phase, so that an error stays in the phase that makes it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, cast

from torch import Tensor

from assay.sites import Phase
from assay.stages import Stage
from assay.trace import Trace, TraceWriter
from assay.training.state.parameters import NamedParameter

# Phases with values, in the order of a step. "inputs" has the labels, "forward" the loss, "backward"
# the gradients of parameters.
PHASES: tuple[Phase, ...] = ("inputs", "forward", "backward", "reduce", "clip", "optimizer")

# Ports with a value for each micro-batch; all others have one value per step.
PER_MICRO_BATCH = frozenset({"labels", "loss"})

# Prefix of an optimizer's counters. An optimizer without counters, or with others, is not wrong.
COUNT = "count-"


@dataclass(frozen=True, slots=True)
class ValueAddress:
    """The address of a value in a step."""

    stage: Stage
    """The stage that computes the value."""
    port: str
    index: int = 0
    """Number of the micro-batch, for ports in PER_MICRO_BATCH."""
    kind: str = field(default="", compare=False)
    """Class of the stage's module, if its own code alone computes the value."""
    dtype: str | None = field(default=None, compare=False)
    """Dtype of the computation, if the tensor is wider."""


def address_of(item: NamedParameter, phase: Phase, what: str) -> ValueAddress:
    """Return the address of a parameter's value; `what` is "gradient", "update" or a moment."""
    dtype = str(item.tensor.dtype).removeprefix("torch.")
    short = item.name.removeprefix(item.module).removeprefix(".")
    kind = item.kind if what == "gradient" and phase == "backward" else ""
    return ValueAddress(Stage(item.module, phase), f"{what}.{short}", 0, kind, dtype)


class StepValueHandler(Protocol):
    """A receiver of the values that `StepObserver` sees in a step."""

    def begin_step(self, step: int) -> None:
        """Assign all values until `end_step` to this step."""

    def observe(self, address: ValueAddress, value: Tensor) -> Tensor:
        """Take a value as its phase ends, and return the value for the next phase."""

    def observe_sum(self, addresses: Sequence[ValueAddress], value: Tensor) -> None:
        """Take the sum of the values of several micro-batches."""

    def observe_state(self, name: str, state: Tensor) -> Tensor:
        """Take a state that is not judged, and return the state to continue with."""

    def find(self, address: ValueAddress) -> Tensor | None:
        """Return the reference's value; None without one, or while it is recorded."""

    def expected(self, phase: Phase) -> Iterable[ValueAddress]:
        """Return the addresses of the reference's values of `phase`; none while it is recorded."""

    def end_step(self) -> None:
        """Finish the step."""


@dataclass(slots=True)
class StepValues:
    """All values of one step, as a trace stores them."""

    stored: dict[ValueAddress, Tensor] = field(default_factory=dict)
    """The exact values."""
    unchanged: dict[ValueAddress, ValueAddress] = field(default_factory=dict)
    """Values that a phase left as injected, each with the stored value it was rounded from.

    In a single process these are all gradients after the reduction.
    """
    states: dict[str, Tensor] = field(default_factory=dict)
    """Injected states that are not judged."""

    @property
    def addresses(self) -> tuple[ValueAddress, ...]:
        """Addresses of all judged values."""
        return (*self.stored, *self.unchanged)

    def write(self, writer: TraceWriter, step: int) -> None:
        """Attach the values to a trace, as numbered tensors and a table of their addresses."""
        tensors = [*self.stored.values(), *self.states.values()]
        numbers = {address: number for number, address in enumerate(self.stored)}
        sources = numbers | {new: numbers[old] for new, old in self.unchanged.items()}
        table = {
            "values": [
                {
                    "phase": address.stage.phase,
                    "module": address.stage.module,
                    "port": address.port,
                    "index": address.index,
                    "tensor": number,
                }
                for address, number in sources.items()
            ],
            "states": list(self.states),
        }
        writer.attach(f"step-{step}", {str(n): tensor for n, tensor in enumerate(tensors)})
        writer.attach_json(f"step-{step}-table", cast("Any", table))

    @classmethod
    def read(cls, trace: Trace, step: int) -> Self:
        """Read the values that `write` attached."""
        tensors = trace.attachment(f"step-{step}")
        table: Any = trace.attachment_json(f"step-{step}-table")
        owners: dict[int, ValueAddress] = {}
        values = cls()
        for row in table["values"]:
            stage, number = Stage(row["module"], row["phase"]), row["tensor"]
            address = ValueAddress(stage, row["port"], row["index"])
            if number in owners:
                values.unchanged[address] = owners[number]
            else:
                owners[number] = address
                values.stored[address] = tensors[str(number)]
        for number, name in enumerate(table["states"], start=len(owners)):
            values.states[name] = tensors[str(number)]
        return values
