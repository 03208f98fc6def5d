"""Values between the phases of a training step, such as gradients, norms and updates, recorded and compared.

The result of a phase is stored exactly. Rounded to the candidate's dtype, it is injected into the next
phase, so that an error stays in the phase that makes it. `StageRecorder` records the values in a trace.
`StageReplayer` measures them against those in a trace, and replaces them.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor

from assay.devices.run_string import parse_run
from assay.errors import MachineError
from assay.hooks.suspension import suspended
from assay.hooks.tensors import Boundary
from assay.judge.results import PortResult, ReplayResults
from assay.replay.gradients import LossScale
from assay.replay.modules import ValueObserver
from assay.replay.ports import RankLayout
from assay.sites import CallSite, Phase
from assay.stages import Stage
from assay.trace import Trace, TraceWriter
from assay.training.protocol import MicroBatch, TrainingPlan
from assay.training.state.files import hash_value, read_golden_state
from assay.training.state.parameters import NamedParameter, PartialSums, in_blocks
from assay.training.state.states import State


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
    return [[len(micro_batch["labels"]) for micro_batch in batch] for batch in batches]


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


@dataclass
class RankScope:
    """The modules, micro-batches and sums of one rank, or of a single process."""

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
    is_alone: bool = False
    """True for a single process, which has to make all calls and to show all values."""

    def is_own_call(self, site: CallSite) -> bool:
        """Return True if this rank has to make a call of the reference."""
        has_run = self.is_alone or (site.step, site.micro_batch) in self.micro_batches_run
        return has_run and self._has(site.module)

    def is_own_value(self, step: int, address: ValueAddress) -> bool:
        """Return True if this rank has to show a value of the reference's step."""
        if address.port == "loss" and self.modules is not None:
            return False  # the schedule of a pipeline does not return losses of micro-batches
        if address.port in PER_MICRO_BATCH:
            return self.is_alone or (step, address.index) in self.micro_batches_run
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


@dataclass
class StepValueHandler:
    """A receiver of the values that `StepObserver` sees in a step. This one takes none, without a reference."""

    scope: RankScope = field(default_factory=lambda: RankScope(is_alone=True), kw_only=True)
    """The values that this process has to show."""
    loss_scale: LossScale = field(default_factory=LossScale, kw_only=True)
    """To be divided out."""
    observer: ValueObserver | None = field(default=None, kw_only=True)

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

    def show(self, item: NamedParameter, before: Tensor, what: str = "update") -> None:
        """Take a parameter where `what` is observed. before: its value before the step."""

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


_UPDATE = "update"
_MOMENTS = ("exp_avg", "exp_avg_sq")

# As they are before any code of a candidate runs in its process, which may replace methods of tensors.
_add, _mul, _div, _sqrt = Tensor.add, Tensor.mul, Tensor.div, Tensor.sqrt
_lerp, _addcmul, _addcdiv = Tensor.lerp, Tensor.addcmul, Tensor.addcdiv
_norm, _sum = torch.linalg.vector_norm, Tensor.sum

# Largest difference of a norm and a sum that other kernels may make; a wrong operation makes a larger one.
_SAME_SUMS = 1e-6


@dataclass
class OptimizerResults:
    """Computes the update and the moments of each parameter in one step."""

    plan: TrainingPlan
    """The yardstick's."""
    step: int
    read_state: Callable[[], State]
    """Read the state before the step."""
    gradient_of: Callable[[str, str], Tensor | None]
    """Return the gradient after clipping, by the module and the parameter's name in it."""
    # Name and results of the parameter that was asked for last.
    _latest: tuple[str, dict[str, Tensor]] = field(default=("", {}))

    def find(self, address: ValueAddress) -> Tensor | None:
        """Return an update or a moment, exact; None for other values and without a gradient."""
        what, _, short = address.port.partition(".")
        if address.stage.phase != "optimizer" or what not in (_UPDATE, *_MOMENTS):
            return None
        module = address.stage.module
        name = f"{module}.{short}" if module else short
        if self._latest[0] != name:
            self._latest = name, self._compute(name, self.gradient_of(module, short))
        return self._latest[1].get(what)

    @cached_property
    def _state(self) -> State:
        return self.read_state()

    def _compute(self, name: str, gradient: Tensor | None) -> dict[str, Tensor]:
        if gradient is None or name not in self._state["model"]:
            return {}
        before, moments = self._state["model"][name], self._state["moments"].get(name, {})
        settings = self.plan.settings_of(name, self.step)
        weight, made = step_adamw(before, gradient, moments, settings, dtype_of(self.plan))
        update = weight.double().sub_(before)
        return {_UPDATE: update} | {moment: made[moment] for moment in _MOMENTS}


def step_adamw(
    weight: Tensor,
    gradient: Tensor,
    moments: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    dtype: torch.dtype,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a weight after a step of AdamW in `dtype`, and its moments, without side effects.

    It is computed as torch.optim.AdamW does, but not by it: in the process of a candidate that class may
    be patched.

    moments: those before the step; empty at the first.
    settings: `lr`, `betas`, `eps` and `weight_decay`.
    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019, algorithm 2.
    """
    if moments:
        step = moments["step"].to(torch.float32) + 1
    else:
        step = torch.ones((), dtype=torch.float32, device="cpu")
        moments = dict.fromkeys(_MOMENTS, torch.zeros_like(weight, dtype=dtype))
    learning_rate, betas = settings["lr"], settings["betas"]
    corrections = [1 - beta ** float(step) for beta in betas]
    results = [torch.empty(weight.shape, dtype=dtype, device=weight.device) for _ in range(3)]
    known = weight.detach(), gradient.detach(), *(moments[name] for name in _MOMENTS)
    for block in in_blocks(*known, *results):
        wide, grad, first, second = (one.to(dtype) for one in block[:4])
        wide = _mul(wide, 1 - learning_rate * settings["weight_decay"])
        first = _lerp(first, grad, 1 - betas[0])
        second = _addcmul(_mul(second, betas[1]), grad, grad, value=1 - betas[1])
        divisor = _add(_div(_sqrt(second), corrections[1] ** 0.5), settings["eps"])
        wide = _addcdiv(wide, first, divisor, value=-learning_rate / corrections[0])
        for result, part in zip(block[4:], (wide, first, second), strict=True):
            result.copy_(part)
    return results[0], {"step": step, **dict(zip(_MOMENTS, results[1:], strict=True))}


def sums_of(value: Tensor) -> tuple[float, float]:
    """Return norm and sum, by which a value is recognized when it is computed again."""
    wide = (one.double() for (one,) in in_blocks(value))
    norms, totals = zip(*((float(_norm(one)), float(_sum(one))) for one in wide), strict=True)
    return math.hypot(*norms), sum(totals)


def require_sums(address: ValueAddress, value: Tensor, expected: tuple[float, float]) -> None:
    """Raise MachineError if `value`, computed again, has other sums than it had when it was recorded."""
    norm, total = sums_of(value)
    allowed = _SAME_SUMS * expected[0]
    # The sum of n random numbers differs by the root of n; NaN is a difference.
    is_same = (
        abs(norm - expected[0]) <= allowed
        and abs(total - expected[1]) <= allowed * value.numel() ** 0.5
    )
    if not is_same:
        raise MachineError(
            f"{address.stage.module}:{address.port} is not what AdamW made of it in the reference: code"
            " of the candidate, or a package that it loads, changes the arithmetic of the host"
        )


@dataclass
class StageRecorder(StepValueHandler):
    """A handler that attaches the values of each step to a trace."""

    writer: TraceWriter
    boundary: Boundary
    rules: TrainingPlan | None = None
    """The yardstick's plan, by which values are left out; None to store all."""
    optimizer: OptimizerResults | None = None
    """Of the next step; None to store them."""
    _values: StepWriter = field(init=False)
    # By module, port and index: a hash of the injected value, and the address of the value it was
    # rounded from.
    _injected: dict[tuple[str, str, int], tuple[str, ValueAddress]] = field(default_factory=dict)
    _clip_factor: float = 1.0

    def begin_step(self, step: int) -> None:
        """Begin a step."""
        self._values = StepWriter(self.writer, step, self.rules)
        self._injected.clear()
        self._clip_factor = 1.0

    def observe(self, address: ValueAddress, value: Tensor) -> Tensor:
        """Store the value unless it follows from others, and return it rounded."""
        name = (address.stage.module, address.port, address.index)
        with suspended():
            if address.port == NORM and self.rules is not None:
                self._clip_factor = clip_factor(self.rules, value)
                value = value.float().double()  # as candidates compute it
            found = self._find_source(address, value)
            if found is not None:
                self._values.scale(address, *found)
                if found[1] == 1:
                    return value
                self._injected.pop(name)  # a value that is scaled twice is stored
            elif self._is_computed(address, value):
                self._values.compute(address, sums_of(value))
            else:
                self._values.store(address, self.boundary.store(value.detach()))
            if not value.is_floating_point() or address.stage.phase == "optimizer":
                return value
            injected = self.boundary.rounded_input(value)
            if found is None:
                self._injected[name] = hash_value(injected), address
            return injected

    def _find_source(
        self, address: ValueAddress, value: Tensor
    ) -> tuple[ValueAddress, float] | None:
        """Return the address of a stored value, and the factor of its injected one that makes `value`."""
        name = (address.stage.module, address.port, address.index)
        if name not in self._injected:
            return None
        digest, source = self._injected[name]
        factor = self._clip_factor if address.stage.phase == "clip" else 1.0
        if factor == 1:
            return (source, factor) if hash_value(value) == digest else None
        injected = self.boundary.rounded_input(value / factor)
        is_scaled = hash_value(injected) == digest and torch.equal(injected.mul_(factor), value)
        return (source, factor) if is_scaled else None

    def _is_computed(self, address: ValueAddress, value: Tensor) -> bool:
        """Return True if the optimizer's rule makes exactly `value`."""
        result = None if self.optimizer is None else self.optimizer.find(address)
        return (
            result is not None and result.dtype == value.dtype and torch.equal(result, value.cpu())
        )

    def observe_state(self, name: str, state: Tensor) -> Tensor:
        """Store the state, and return it."""
        self._values.store_state(name, state)
        return state

    def end_step(self) -> None:
        """Write the rest of the step."""
        self._values.finish()


# Ports at which `show` gives the parameter itself to an observer.
_SHOWN = ("update.", "changed-later.")


@dataclass
class StageReplayer(StepValueHandler):
    """A handler that measures the values of each step against those in a trace."""

    golden: Path
    boundary: Boundary
    rows: RunRows
    results: dict[Phase, ReplayResults] = field(
        default_factory=lambda: {phase: ReplayResults() for phase in PHASES}
    )
    _step: int = 0
    _values: StepValues = field(default_factory=StepValues)
    _optimizer: OptimizerResults | None = None
    _missing: set[ValueAddress] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.trace = Trace.open(self.golden / TRACE)

    def begin_step(self, step: int) -> None:
        """Read the reference's values for the step."""
        self._step = step
        self._values = StepValues.read(self.trace, step)
        rules = self._values.rules
        if rules is not None:
            dtype = dtype_of(rules)
            self._optimizer = OptimizerResults(
                rules,
                step,
                partial(read_golden_state, self.golden, step),
                lambda module, name: self.injected(
                    ValueAddress(Stage(module, "clip"), f"gradient.{name}"), dtype
                ),
            )
        self._missing = set(self._values.addresses)

    def observe(self, address: ValueAddress, value: Tensor) -> Tensor:
        """Measure the value, and return the reference's."""
        return self._measure(address, value, self.find(address))

    def observe_sum(self, addresses: Sequence[ValueAddress], value: Tensor) -> None:
        """Measure the value against the sum of the reference's."""
        parts = [part for address in addresses if (part := self.find(address)) is not None]
        self._missing.difference_update(addresses)
        total = torch.stack(parts).sum(0) if len(parts) == len(addresses) else None
        self._measure(addresses[0], value, total)

    def _measure(self, address: ValueAddress, value: Tensor, expected: Tensor | None) -> Tensor:
        results = self.results[address.stage.phase]
        if expected is None:
            if not address.port.startswith(COUNT):
                results.note_extra_port(address.stage.module, address.port)
            return value
        self._missing.discard(address)
        dtype = address.dtype or str(value.dtype).removeprefix("torch.")
        stage = address.stage
        result = results.at(stage.module, address.port, stage, dtype, address.kind)
        actual = value.detach().cpu()
        if actual.shape != expected.shape:
            self._count_exact(result, address, 1, 1)
            return value
        if self.observer is not None and not address.port.startswith(_SHOWN):
            self.observer.measure(self._site(address), address.port, value, expected)
        if not expected.is_floating_point():
            num_different = int((actual != expected).sum())
            self._count_exact(result, address, expected.numel(), num_different)
            return value
        with suspended():
            if actual.dtype.itemsize > expected.dtype.itemsize:
                actual = actual.to(expected.dtype)
            width = expected.shape[-1] if expected.ndim else 1
            pair = actual.reshape(-1, width), expected.reshape(-1, width)
            rows = torch.full((len(pair[0]),), self._first_row(address))
            result.sums.add_later(*pair, rows, torch.full_like(rows, -1))
            if stage.phase == "optimizer":
                return expected
            return self.boundary.injected(expected, value.dtype).to(value.device)

    def show(self, item: NamedParameter, before: Tensor, what: str = "update") -> None:
        """Let the observer see the parameter in place of its change."""
        change = self.find(address_of(item, "optimizer", "update"))
        if self.observer is not None and change is not None:
            address, expected = address_of(item, "optimizer", what), before.cpu().double() + change
            self.observer.measure(self._site(address), address.port, item.tensor, expected)

    def _site(self, address: ValueAddress) -> CallSite:
        stage = address.stage
        return CallSite(self._step, stage.module, 0, stage.phase, micro_batch=address.index)

    def injected(self, address: ValueAddress, dtype: torch.dtype) -> Tensor | None:
        """Return the reference's value for the next phase in `dtype`, if there is one."""
        expected = self.find(address)
        return None if expected is None else self.boundary.injected(expected, dtype)

    def observe_state(self, name: str, state: Tensor) -> Tensor:
        """Return the reference's state."""
        kept = self._values.states.get(name)
        # Generators read the state beyond its end in memory, which a mapped file does not allow.
        return state if kept is None else kept.clone()

    def find(self, address: ValueAddress) -> Tensor | None:
        """Return the reference's value, if there is one."""
        values = self._values
        with suspended():
            if address in values.scaled:
                source, factor = values.scaled[address]
                stored = values.stored[source]
                if values.rules is None or factor == 1:
                    return self.boundary.injected(stored, stored.dtype)
                injected = self.boundary.injected(stored, dtype_of(values.rules))
                return self.boundary.as_stored(injected * factor)
            if address in values.computed and self._optimizer is not None:
                result = self._optimizer.find(address)
                if result is None:
                    return None
                require_sums(address, result, values.computed[address])
                return self.boundary.as_stored(result)
        return values.stored.get(address)

    def expected(self, phase: Phase) -> Iterable[ValueAddress]:
        """Return the addresses of the reference's values of `phase` in this step."""
        return [address for address in self._values.addresses if address.stage.phase == phase]

    def skip(self, address: ValueAddress) -> None:
        """Expect no such value in this step."""
        self._missing.discard(address)

    def end_step(self) -> None:
        """Note the reference's values that this run did not show."""
        for address in sorted(self._missing, key=lambda item: (item.stage, item.port, item.index)):
            is_own = self.scope.is_own_value(self._step, address)
            if address.port.startswith(COUNT) or not is_own:
                continue
            self.results[address.stage.phase].note_missing_port(address.stage.module, address.port)

    def _first_row(self, address: ValueAddress) -> int:
        """Return the first row of the value's micro-batch, which stands for the value."""
        return self.rows.of_micro_batch(self._step, address.index, 1)[0]

    def _count_exact(
        self, result: PortResult, address: ValueAddress, num_compared: int, num_different: int
    ) -> None:
        result.exact.add(num_compared, num_different)
        if num_different and result.exact.first == (-1, -1):
            result.exact.first = (self._first_row(address), -1)
