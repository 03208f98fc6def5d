"""Values between the phases of a training step: gradients, norms, updates.

The result of a phase is stored exactly. Rounded to the candidate's dtype, it is injected into the next
phase, so that an error stays in the phase that makes it.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Self, cast

import torch
from torch import Tensor

from assay.devices.run_string import parse_run
from assay.locating.ports import RankLayout
from assay.sites import CallSite, Phase
from assay.stages import Stage
from assay.trace import Trace, TraceWriter
from assay.training.protocol import MicroBatch, TrainingPlan
from assay.training.state.parameters import NamedParameter, PartialSums


@dataclass(frozen=True, slots=True)
class RunRows:
    """The rows of each step and micro-batch of a run, in the order in which batches are planned."""

    numbers: Mapping[tuple[int, int], range]
    """Row numbers by step and micro-batch."""
    step_starts: tuple[int, ...]
    """Number of the first row of each step."""

    @classmethod
    def of_counts(cls, num_rows: Sequence[Sequence[int]]) -> Self:
        """Build the table from the number of rows of each micro-batch of each step."""
        places = [
            (step, number) for step, counts in enumerate(num_rows) for number in range(len(counts))
        ]
        ends = accumulate((count for counts in num_rows for count in counts), initial=0)
        numbers = dict(zip(places, (range(*pair) for pair in pairwise(ends)), strict=True))
        return cls(numbers, tuple(accumulate(map(sum, num_rows[:-1]), initial=0)))

    @classmethod
    def of_batches(cls, batches: Sequence[Sequence[MicroBatch]]) -> Self:
        """Build the table for the batches of a run."""
        return cls.of_counts(count_rows(batches))

    def of_micro_batch(self, step: int, micro_batch: int, count: int) -> tuple[int, ...]:
        """Return the numbers of the first `count` rows of a micro-batch; -1 for unplanned rows."""
        return (*self.numbers.get((step, micro_batch), ()), *[-1] * count)[:count]

    def step_of(self, row: int) -> int:
        """Return the step of a row."""
        return bisect_right(self.step_starts, row) - 1


def count_rows(batches: Sequence[Sequence[MicroBatch]]) -> list[list[int]]:
    """Count the rows of each micro-batch of each step."""
    return [[len(micro_batch["input_ids"]) for micro_batch in batch] for batch in batches]


# Phases with values, in the order of a step. "inputs" has the labels, "forward" the loss, "backward"
# the gradients of parameters.
PHASES: tuple[Phase, ...] = ("inputs", "forward", "backward", "reduce", "clip", "optimizer")

# Ports with a value for each micro-batch; all others have one value per step.
PER_MICRO_BATCH = frozenset({"labels", "loss"})

# The port of the gradients' norm before clipping.
NORM = "norm"

# The folder of all values in a golden.
TRACE = "trace"

# Prefix of an optimizer's counters. An optimizer without counters, or with others, is not wrong.
COUNT = "count-"


# Added to the norm before it divides. Source: torch.nn.utils.clip_grad_norm_.
_CLIP_EPS = 1e-6


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


class StepValueHandler:
    """A receiver of the values that `StepObserver` sees in a step. This one takes none, without a reference."""

    def begin_step(self, step: int) -> None:
        """Assign all values until `end_step` to this step."""

    def observe(self, address: ValueAddress, value: Tensor) -> Tensor:
        """Take a value as its phase ends, and return the value for the next phase.

        No phase follows the optimizer: there, return the reference's value, or `value` without one.
        """
        del address
        return value

    def observe_sum(self, addresses: Sequence[ValueAddress], value: Tensor) -> None:
        """Take the sum of the values of several micro-batches, which a reference runs separately."""
        raise NotImplementedError

    def observe_state(self, name: str, state: Tensor) -> Tensor:
        """Take a state that is not judged, and return the state to continue with."""
        del name
        return state

    def find(self, address: ValueAddress) -> Tensor | None:
        """Return the reference's value; None without one, or while it is recorded."""
        del address
        return None

    def expected(self, phase: Phase) -> Iterable[ValueAddress]:
        """Return the addresses of the reference's values of `phase`; none while it is recorded."""
        del phase
        return ()

    def skip(self, address: ValueAddress) -> None:
        """Expect no such value in this step: no method of the trainer shows it."""

    def end_step(self) -> None:
        """Finish the step."""


# Fields of the yardstick's plan, by which some values of a step follow from others.
_RULES = ("learning_rate", "max_grad_norm", "learning_rate_factors", "parameter_groups")


def clip_factor(plan: TrainingPlan, norm: Tensor) -> float:
    """Return the factor by which a trainer of `plan` clips gradients with this norm."""
    return float((plan.max_grad_norm / (norm.to(dtype_of(plan)) + _CLIP_EPS)).clamp(max=1.0))


def dtype_of(plan: TrainingPlan) -> torch.dtype:
    """Return the dtype in which a trainer of `plan` computes."""
    dtype: torch.dtype = getattr(torch, parse_run(plan.run).dtype)
    return dtype


@dataclass(slots=True)
class StepValues:
    """All values of one step, as a trace has them."""

    stored: dict[ValueAddress, Tensor] = field(default_factory=dict)
    """The exact values."""
    scaled: dict[ValueAddress, tuple[ValueAddress, float]] = field(default_factory=dict)
    """Injected values times a factor, each with the stored value that the injected one was rounded from.

    With the factor 1 these are the gradients that a phase leaves unchanged, as the reduction in a single
    process; with others they are clipped gradients.
    """
    computed: dict[ValueAddress, tuple[float, float]] = field(default_factory=dict)
    """Norm and sum of the optimizer's results, which follow from the state before the step and its gradients."""
    rules: TrainingPlan | None = None
    """The yardstick's plan; None if all values are stored."""
    states: dict[str, Tensor] = field(default_factory=dict)
    """Injected states that are not judged."""

    @property
    def addresses(self) -> tuple[ValueAddress, ...]:
        """Addresses of all judged values."""
        return (*self.stored, *self.scaled, *self.computed)

    @classmethod
    def read(cls, trace: Trace, step: int) -> Self:
        """Read the values that a `StepWriter` attached."""
        table: Any = trace.attachment_json(f"step-{step}-table")
        tensors: dict[str, Tensor] = {}
        for name in table["attachments"]:
            tensors |= trace.attachment(name)
        owners: dict[int, ValueAddress] = {}
        values = cls()
        if (rules := table["rules"]) is not None:
            values.rules = TrainingPlan("", f"cpu/{rules.pop('dtype')}", **rules)
        for row in table["values"]:
            stage, number = Stage(row["module"], row["phase"]), row["tensor"]
            address = ValueAddress(stage, row["port"], row["index"])
            if number is None:
                values.computed[address] = tuple(row["sums"])
            elif number in owners:
                values.scaled[address] = owners[number], row["factor"]
            else:
                owners[number] = address
                values.stored[address] = tensors[str(number)]
        values.states = {name: tensors[name] for name in table["states"]}
        return values


# Values of this size are written at once; until then they are kept in memory.
_PART_BYTES = 256 << 20


class StepWriter:
    """Attaches the values of one step to a trace in parts: numbered tensors, and one table."""

    def __init__(self, writer: TraceWriter, step: int, rules: TrainingPlan | None = None) -> None:
        self._writer, self._step, self._rules = writer, step, rules
        self._rows: dict[ValueAddress, dict[str, Any]] = {}
        self._states: list[str] = []
        self._kept: dict[str, Tensor] = {}
        self._attachments: list[str] = []
        self._num_bytes = self._num_stored = 0

    def store(self, address: ValueAddress, value: Tensor) -> None:
        """Store a value."""
        self._add(address, self._num_stored)
        self._keep(str(self._num_stored), value)
        self._num_stored += 1

    def scale(self, address: ValueAddress, source: ValueAddress, factor: float) -> None:
        """Note that a value is the stored value of `source`, rounded, times `factor`."""
        self._add(address, self._rows[source]["tensor"], factor=factor)

    def compute(self, address: ValueAddress, sums: tuple[float, float]) -> None:
        """Note that a value is what the optimizer makes of state and gradients; sums: its norm and sum."""
        self._add(address, None, sums=sums)

    def _add(self, address: ValueAddress, tensor: int | None, **facts: object) -> None:
        place = {"phase": address.stage.phase, "module": address.stage.module}
        value = {"port": address.port, "index": address.index, "tensor": tensor}
        self._rows[address] = {**place, **value, "factor": 1.0, "sums": None, **facts}

    def store_state(self, name: str, state: Tensor) -> None:
        """Store a state that is not judged."""
        self._states.append(name)
        self._keep(name, state)

    def finish(self) -> None:
        """Write the rest and the table."""
        if self._kept:
            self._write_part()
        rules, plan = None, self._rules
        if plan is not None:
            dtype = parse_run(plan.run).dtype
            rules = {"dtype": dtype, **{name: getattr(plan, name) for name in _RULES}}
        table = {
            "values": list(self._rows.values()),
            "states": self._states,
            "rules": rules,
            "attachments": self._attachments,
        }
        self._writer.attach_json(f"step-{self._step}-table", cast("Any", table))

    def _keep(self, name: str, tensor: Tensor) -> None:
        self._kept[name] = tensor
        self._num_bytes += tensor.nbytes
        if self._num_bytes >= _PART_BYTES:
            self._write_part()

    def _write_part(self) -> None:
        name = f"step-{self._step}-{len(self._attachments)}"
        self._writer.attach(name, self._kept)
        self._attachments.append(name)
        self._kept, self._num_bytes = {}, 0


@dataclass
class RankScope:
    """The modules, micro-batches and sums of one rank."""

    partial: PartialSums | None = None
    """Gradients before their reduction, a part on each rank; None if observed gradients are whole."""
    summed_by_backward: PartialSums | None = None
    """The ranks over which backward itself reduces gradients; None if it does not."""
    layout: RankLayout | None = None
    """Layout of the tensors at module boundaries; None if every rank has whole tensors."""
    modules: frozenset[str] | None = None
    """Paths of this rank's modules; None for all."""
    partial_modules: frozenset[str] = frozenset()
    """Modules of which this rank has only some children."""
    micro_batches_run: set[tuple[int, int]] = field(default_factory=set)
    """Step and number of each micro-batch that this rank has run."""

    def is_own_call(self, site: CallSite) -> bool:
        """Return True if this rank has to make a call of the reference."""
        return (site.step, site.micro_batch) in self.micro_batches_run and self._has(site.module)

    def is_own_value(self, step: int, address: ValueAddress) -> bool:
        """Return True if this rank has to show a value of the reference's step."""
        if address.port == "loss" and self.modules is not None:
            return False  # the schedule of a pipeline does not return losses of micro-batches
        if address.port in PER_MICRO_BATCH:
            return (step, address.index) in self.micro_batches_run
        return not address.stage.module or self._has(address.stage.module)

    def own_part(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a whole state: its parameters and their moments."""
        return dict(state) | {
            kind: {
                name: value
                for name, value in state[kind].items()
                if self._has(name.rpartition(".")[0])
            }
            for kind in ("model", "moments")
        }

    def _has(self, module: str) -> bool:
        return self.modules is None or (
            module in self.modules and module not in self.partial_modules
        )
