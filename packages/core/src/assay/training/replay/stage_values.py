"""Values between the phases of a step: gradients, norms, updates; recorded, or measured and replaced.

What a phase made is kept exactly; the next one is fed it rounded to the candidate's dtype, so that
an error stays in the phase that makes it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from assay.comparing.results import PortResult, ReplayResults
from assay.hooks.boundary import Boundary
from assay.hooks.suspension import suspended
from assay.metrics import PairSums
from assay.sites import Phase
from assay.stages import Stage
from assay.trace import Trace, TraceWriter

# Phases whose values are met here, in the order of a step; "inputs" has the labels, "forward" the
# loss, "backward" the gradients of parameters.
PHASES: tuple[Phase, ...] = ("inputs", "forward", "backward", "reduce", "clip", "optimizer")


# Micro-batches of a step, and rows of a micro-batch, that have numbers of their own.
_MOST = 1000

# Ports that have a value for each micro-batch; of all others a step has one.
PER_MICRO_BATCH = frozenset({"labels", "loss"})

# Before the name of a counter of an optimizer. One that has none, or another, is not wrong for that.
COUNT = "count-"

# In place of a phase, for what is fed and not judged.
_STATE = "state"


@dataclass(frozen=True, slots=True)
class ValueAddress:
    """A value within a step: the stage that made it, its name, and which one of several it is.

    kind: class of the stage's module, where the value is all its own.
    dtype: in which it was computed, where the tensor is wider.
    """

    stage: Stage
    port: str
    index: int = 0
    kind: str = ""
    dtype: str | None = None

    @property
    def key(self) -> str:
        """Unique in a step."""
        return "|".join((self.stage.phase, self.stage.module, self.port, str(self.index)))

    @classmethod
    def of_key(cls, key: str) -> "ValueAddress":
        """The spot that has this key."""
        phase, module, port, index = key.split("|")
        return cls(Stage(module, phase), port, int(index))  # type: ignore[arg-type]


class StepValueHandler(Protocol):
    """What is done with the values of a step."""

    def begin_step(self, step: int) -> None:
        """What is met from now on belongs to this step."""

    def observe(self, address: ValueAddress, value: Tensor) -> Tensor:
        """Take a value; returns the one that the next phase is fed."""

    def observe_state(self, name: str, state: Tensor) -> Tensor:
        """Take a state that is not judged; returns the one to go on with."""

    def expected(self, phase: Phase) -> Iterable[ValueAddress]:
        """Where the reference has values of `phase` in this step; nothing while it is recorded."""

    def end_step(self) -> None:
        """The step is over."""


@dataclass
class StageRecorder:
    """Attaches the values of each step to a trace.

    What a phase leaves exactly as it was handed is not stored again, as the reduction of a single
    process leaves all gradients.
    """

    writer: TraceWriter
    boundary: Boundary
    _step: int = 0
    _values: dict[str, Tensor] = field(default_factory=dict)
    _unchanged: dict[str, str] = field(default_factory=dict)  # key -> key of what is stored
    # By module, port and index what the next phase is fed, and the key of what it was made from.
    _injected: dict[tuple[str, str, int], tuple[Tensor, str]] = field(default_factory=dict)

    def begin_step(self, step: int) -> None:
        """See StepValueHandler."""
        self._step = step
        for kept in (self._values, self._unchanged, self._injected):
            kept.clear()

    def observe(self, address: ValueAddress, value: Tensor) -> Tensor:
        """Keep the value, and hand it on rounded."""
        name = (address.stage.module, address.port, address.index)
        with suspended():
            injected, source = self._injected.get(name, (None, ""))
            if injected is not None and torch.equal(injected, value):
                self._unchanged[address.key] = source
                return injected
            stored = self.boundary.store(value.detach())
            self._values[address.key] = stored
            if not value.is_floating_point():
                return value
            injected = self.boundary.injected(stored, value.dtype)
            self._injected[name] = injected, address.key
            return injected

    def observe_state(self, name: str, state: Tensor) -> Tensor:
        """Keep the state."""
        self._values[f"{_STATE}|{name}"] = state
        return state

    def expected(self, phase: Phase) -> Iterable[ValueAddress]:
        """Nothing is expected of what is recorded."""
        del phase
        return ()

    def end_step(self) -> None:
        """Write the step."""
        self.writer.attach(attachment_of(self._step), self._values)
        self.writer.attach_json(f"{attachment_of(self._step)}-unchanged", dict(self._unchanged))
        self._values.clear()
        self._injected.clear()


def _is_every_value(step: int, address: ValueAddress) -> bool:
    del step, address
    return True


@dataclass
class StageReplayer:
    """Measures the values of each step against those in a trace.

    results: by phase.
    is_own: whether this process has to show a value of a step; others may be another rank's.
    """

    trace: Trace
    boundary: Boundary
    results: dict[Phase, ReplayResults] = field(
        default_factory=lambda: {phase: ReplayResults() for phase in PHASES}
    )
    is_own: Callable[[int, ValueAddress], bool] = _is_every_value
    _step: int = 0
    _values: dict[str, Tensor] = field(default_factory=dict)
    _unchanged: dict[str, str] = field(default_factory=dict)
    _missing: set[str] = field(default_factory=set)

    def begin_step(self, step: int) -> None:
        """See StepValueHandler."""
        self._step = step
        self._values = self.trace.attachment(attachment_of(step))
        unchanged: Any = self.trace.attachment_json(f"{attachment_of(step)}-unchanged")
        self._unchanged = dict(unchanged)
        self._missing = {key for key in self._keys() if not key.startswith(f"{_STATE}|")}

    def observe(self, address: ValueAddress, value: Tensor) -> Tensor:
        """Measure the value, and hand on the reference's."""
        expected = self._find(address.key)
        results = self.results[address.stage.phase]
        if expected is None:
            if not address.port.startswith(COUNT):
                results.note_extra_port(address.stage.module, address.port)
            return value
        self._missing.discard(address.key)
        result = self._result(results, address, value)
        actual = value.detach().cpu()
        if actual.shape != expected.shape:
            result.exact.add(1, 1)
            if result.exact.first == (-1, -1):
                result.exact.first = (row_number(self._step, address.index), -1)
            return value
        if not expected.is_floating_point():
            num_different = int((actual != expected).sum())
            result.exact.add(expected.numel(), num_different)
            if num_different and result.exact.first == (-1, -1):
                result.exact.first = (row_number(self._step, address.index), -1)
            return value
        with suspended():
            if actual.dtype.itemsize > expected.dtype.itemsize:
                actual = actual.to(expected.dtype)
            width = expected.shape[-1] if expected.ndim else 1
            pair = actual.reshape(-1, width), expected.reshape(-1, width)
            rows = torch.full((len(pair[0]),), row_number(self._step, address.index))
            result.sums.add_later(*pair, rows, torch.full_like(rows, -1))
            return self.boundary.injected(expected, value.dtype).to(value.device)

    def observe_state(self, name: str, state: Tensor) -> Tensor:
        """The reference's state."""
        kept = self._values.get(f"{_STATE}|{name}")
        # A generator reads its state as what it was in memory: a mapped file has no such end.
        return state if kept is None else kept.clone()

    def expected(self, phase: Phase) -> Iterable[ValueAddress]:
        """All values of `phase` that the reference has in this step."""
        return [ValueAddress.of_key(key) for key in self._keys() if key.startswith(f"{phase}|")]

    def end_step(self) -> None:
        """Note what the reference has and this run did not show."""
        for key in sorted(self._missing):
            address = ValueAddress.of_key(key)
            if address.port.startswith(COUNT) or not self.is_own(self._step, address):
                continue
            name = f"{address.stage.module or '(model)'}:{address.port}"
            missing = self.results[address.stage.phase].unmatched_expected
            if name not in missing:
                missing.append(name)

    def _keys(self) -> Iterable[str]:
        return (*self._values, *self._unchanged)

    def _find(self, key: str) -> Tensor | None:
        source = self._unchanged.get(key)
        if source is None:
            return self._values.get(key)
        with suspended():
            return self.boundary.injected(self._values[source], self._values[source].dtype)

    def _result(self, results: ReplayResults, address: ValueAddress, value: Tensor) -> PortResult:
        key = (address.stage.module, address.port)
        result = results.ports.get(key)
        if result is None:
            dtype = address.dtype or str(value.dtype).removeprefix("torch.")
            result = PortResult(
                *key,
                address.stage,
                len(results.ports),
                dtype,
                address.kind,
                sums=PairSums(counts_misrounded=False),
            )
            results.ports[key] = result
        return result


def row_number(step: int, micro_batch: int = 0) -> int:
    """Number of the first row of a micro-batch: each row of a run has one of its own."""
    return (step * _MOST + micro_batch) * _MOST


def step_of(row: int) -> int:
    """The step to which a row belongs."""
    return row // (_MOST * _MOST)


def attachment_of(step: int) -> str:
    """Name of the attachment that holds the values of a step."""
    return f"step-{step}"
