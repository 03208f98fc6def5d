"""Handlers of the values between the phases of training steps.

`StageRecorder` records them in a trace. `StageReplayer` measures them against those in a trace, and
replaces them.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.comparing.results import PortResult, ReplayResults
from assay.errors import MachineError
from assay.hooks.suspension import suspended
from assay.hooks.tensors import Boundary
from assay.sites import Phase
from assay.stages import Stage
from assay.trace import Trace, TraceWriter
from assay.training.protocol import TrainingPlan
from assay.training.replay.step_values import (
    COUNT,
    NORM,
    PHASES,
    TRACE,
    RankScope,
    RunRows,
    StepValueHandler,
    StepValues,
    StepWriter,
    ValueAddress,
    clip_factor,
    dtype_of,
)
from assay.training.state.files import hash_value, read_golden_state
from assay.training.state.parameters import in_blocks
from assay.training.state.states import State

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


@dataclass
class StageReplayer(StepValueHandler):
    """A handler that measures the values of each step against those in a trace."""

    golden: Path
    boundary: Boundary
    rows: RunRows
    results: dict[Phase, ReplayResults] = field(
        default_factory=lambda: {phase: ReplayResults() for phase in PHASES}
    )
    scope: RankScope | None = None
    """The values that this rank has to show; None for all."""
    trace: Trace | None = None
    """The trace of the golden; None to open it here."""
    _step: int = 0
    _values: StepValues = field(default_factory=StepValues)
    _optimizer: OptimizerResults | None = None
    _missing: set[ValueAddress] = field(default_factory=set)

    def begin_step(self, step: int) -> None:
        """Read the reference's values for the step."""
        self._step = step
        if self.trace is None:
            self.trace = Trace.open(self.golden / TRACE)
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
            is_own = self.scope is None or self.scope.is_own_value(self._step, address)
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
