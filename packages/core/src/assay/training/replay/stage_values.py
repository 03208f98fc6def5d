"""Values between the phases of a training step: gradients, norms, updates.

What a phase made is kept exactly, and is injected into the next one rounded to the candidate's
dtype, so that an error stays in the phase that makes it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, cast

from torch import Tensor

from assay.sites import Phase
from assay.stages import Stage
from assay.trace import Trace, TraceWriter
from assay.training.state.parameters import NamedParameter

# Phases with values of their own, in the order of a step; "inputs" has the labels, "forward" the
# loss, "backward" the gradients of parameters.
PHASES: tuple[Phase, ...] = ("inputs", "forward", "backward", "reduce", "clip", "optimizer")

# Ports that have a value for each micro-batch; of all others a step has one.
PER_MICRO_BATCH = frozenset({"labels", "loss"})

# Before the name of a counter of an optimizer. One that has none, or another, is not wrong for that.
COUNT = "count-"


@dataclass(frozen=True, slots=True)
class ValueAddress:
    """Where a value stands in a step: the stage that made it, its port, and its micro-batch.

    index: number of the micro-batch, for ports that have a value for each.
    kind: class of the stage's module, where the value is made by its own code alone.
    dtype: in which the value was computed, where the tensor is wider.
    """

    stage: Stage
    port: str
    index: int = 0
    kind: str = field(default="", compare=False)
    dtype: str | None = field(default=None, compare=False)


def address_of(item: NamedParameter, phase: Phase, what: str) -> ValueAddress:
    """Where a value of a parameter stands; `what` is such as "gradient" or "update"."""
    dtype = str(item.tensor.dtype).removeprefix("torch.")
    short = item.name.removeprefix(item.module).removeprefix(".")
    kind = item.kind if what == "gradient" and phase == "backward" else ""
    return ValueAddress(Stage(item.module, phase), f"{what}.{short}", 0, kind, dtype)


class StepValueHandler(Protocol):
    """What is done with the values of a step, as `StepObserver` shows them."""

    def begin_step(self, step: int) -> None:
        """Called before a step runs: all values until `end_step` are of this step."""

    def observe(self, address: ValueAddress, value: Tensor) -> Tensor:
        """Called with each value as its phase ends; returns the one for the next phase."""

    def observe_sum(self, addresses: Sequence[ValueAddress], value: Tensor) -> None:
        """Called with a value that is the sum of those of several micro-batches."""

    def observe_state(self, name: str, state: Tensor) -> Tensor:
        """Called with a state that is not judged; returns the one to go on with."""

    def find(self, address: ValueAddress) -> Tensor | None:
        """The reference's value; None where it has none, or is being recorded."""

    def expected(self, phase: Phase) -> Iterable[ValueAddress]:
        """Where the reference has values of `phase` in this step; empty while it is recorded."""

    def end_step(self) -> None:
        """Called when the step has run."""


@dataclass(slots=True)
class StepValues:
    """All values of one step, as a trace keeps them.

    stored: the exact values.
    unchanged: values that a phase leaves as they were injected, each with the stored one from which
        it was made: a single process's reduction leaves all gradients so.
    states: what is injected and not judged, by name.
    """

    stored: dict[ValueAddress, Tensor] = field(default_factory=dict)
    unchanged: dict[ValueAddress, ValueAddress] = field(default_factory=dict)
    states: dict[str, Tensor] = field(default_factory=dict)

    @property
    def addresses(self) -> tuple[ValueAddress, ...]:
        """Of all values that are judged."""
        return (*self.stored, *self.unchanged)

    def write(self, writer: TraceWriter, step: int) -> None:
        """Attach the values to a trace: numbered tensors, and a table of what each is."""
        tensors = [*self.stored.values(), *self.states.values()]
        numbers = {address: number for number, address in enumerate(self.stored)}
        sources = numbers | {new: numbers[old] for new, old in self.unchanged.items()}
        table = {
            "values": [_to_row(address) | {"tensor": n} for address, n in sources.items()],
            "states": list(self.states),
        }
        writer.attach(_attachment(step), {str(n): tensor for n, tensor in enumerate(tensors)})
        writer.attach_json(f"{_attachment(step)}-table", cast("Any", table))

    @classmethod
    def read(cls, trace: Trace, step: int) -> Self:
        """The values that `write` attached."""
        tensors = trace.attachment(_attachment(step))
        table: Any = trace.attachment_json(f"{_attachment(step)}-table")
        owners: dict[int, ValueAddress] = {}
        values = cls()
        for row in table["values"]:
            address, number = _from_row(row), row["tensor"]
            if number in owners:
                values.unchanged[address] = owners[number]
            else:
                owners[number] = address
                values.stored[address] = tensors[str(number)]
        for number, name in enumerate(table["states"], start=len(owners)):
            values.states[name] = tensors[str(number)]
        return values


def _to_row(address: ValueAddress) -> dict[str, str | int]:
    return {
        "phase": address.stage.phase,
        "module": address.stage.module,
        "port": address.port,
        "index": address.index,
    }


def _from_row(row: dict[str, Any]) -> ValueAddress:
    return ValueAddress(Stage(row["module"], row["phase"]), row["port"], row["index"])


def _attachment(step: int) -> str:
    return f"step-{step}"
