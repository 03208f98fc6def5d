"""Observes a trainer from outside, records or measures its steps, and injects a golden's values.

Micro-batches are identified by their content. Shape legend: B rows, T tokens.
"""

import copy
import random
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from assay.errors import UsageError
from assay.hooks.coverage_watch import UsageWatch
from assay.hooks.gradient_taps import BoundaryHandler, GradientTaps
from assay.hooks.module_tracer import ModuleTracer
from assay.hooks.row_positions import BatchPositions, find_tokens
from assay.hooks.suspension import suspended_modes
from assay.hooks.tensors import Boundary
from assay.judge.coverage import Usage
from assay.judge.results import ReplayResults, attach_results
from assay.models.config_files import attention_of
from assay.replay.gradients import GradientReplayer, LossScale
from assay.replay.ports import BatchSource
from assay.replay.trace_views import PackedBatch, PackedTrace, Segment
from assay.sites import Phase
from assay.stages import Stage
from assay.trace import TraceWriter
from assay.training.batches import copied
from assay.training.losses import IGNORED
from assay.training.protocol import PHASE_METHODS, SCHEDULE_METHOD, MicroBatch, StepReport
from assay.training.replay.parameter_watch import GradientSums, ObservedGradients, UpdateWatch
from assay.training.replay.step_values import (
    NORM,
    PHASES,
    RankScope,
    RunRows,
    StageReplayer,
    StepValueHandler,
    ValueAddress,
)
from assay.training.reports import GradientFindings, GradientShare, KeptGradients, ReplayFindings
from assay.training.state.parameters import whole
from assay.training.trainers.registry import OpenedTrainer

P = ParamSpec("P")
R = TypeVar("R")
Norm = TypeVar("Norm", bound="Tensor | float")

# A wrapper gets the wrapped method and its arguments.
_Wrapper = Callable[Concatenate[Callable[..., Any], ...], object]


class StepObserver:
    """Passes the result of every phase of a trainer's step to a handler, and injects its answer.

    Recording needs no more. `ReplayedSteps` also measures what is between the results.

    modules: records or measures the values at module boundaries.
    untrained: buffers and frozen parameters of the reference's model; None for all.
    """

    def __init__(
        self,
        opened: OpenedTrainer,
        handler: StepValueHandler,
        modules: BoundaryHandler,
        rows: RunRows,
        untrained: frozenset[str] | None = None,
    ) -> None:
        self.opened, self.handler, self.rows = opened, handler, rows
        self.taps = GradientTaps(modules)
        self.usage = UsageWatch(self.taps)
        self.usage.add_parameters_of(opened.trainer.model)
        self.tracer = ModuleTracer(self.usage)
        self.updates = UpdateWatch(opened.trainer, handler, untrained)
        self.found, self.of_gradients = ReplayFindings(), GradientFindings()
        # Declared invisible phases, whose work may not be finished when their method ends. A declared
        # reduction is an exception: backward does it, so it is finished.
        self._late = frozenset(opened.traits.invisible_phases) - {"reduce"}
        self.of_parameters = ObservedGradients(handler, self._late, self.of_gradients)
        self._step = 0
        self._batch: Sequence[MicroBatch] = ()
        self._is_updating = self._is_clipped = False
        self._losses: list[tuple[tuple[int, ...], Tensor]] = []

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Observe inside this context."""
        wrappers: dict[str, _Wrapper] = {
            PHASE_METHODS["forward"]: self._compute_loss,
            PHASE_METHODS["backward"]: self._backward,
            PHASE_METHODS["reduce"]: self._reduce,
            PHASE_METHODS["clip"]: self._clip,
            PHASE_METHODS["optimizer"]: self._optimize,
            SCHEDULE_METHOD: self._run_schedule,
        }
        originals = self.opened.methods
        for name, method in originals.items():
            setattr(self.opened.trainer, name, partial(wrappers[name], method))
        optimizer, attributes = self.opened.trainer.optimizer, vars(self.opened.trainer.optimizer)
        kept = {"step": attributes["step"]} if "step" in attributes else {}
        # Not by torch's hooks, which do not fire any more once something is compiled.
        attributes["step"] = wraps(optimizer.step)(partial(self._optimize, optimizer.step))
        # Calls outside of the loss, for an evaluation for example, are not training.
        self.tracer.paused = bool({PHASE_METHODS["forward"], SCHEDULE_METHOD} & originals.keys())
        handles = []
        if not self.tracer.paused:  # a micro-batch begins with the forward call
            handles.append(
                self.opened.root.register_forward_pre_hook(
                    self._begin_root_call, prepend=True, with_kwargs=True
                )
            )
        try:
            with self.tracer.attached(self.opened.root):
                yield
        finally:
            for handle in handles:
                handle.remove()
            for name in originals:
                delattr(self.opened.trainer, name)
            del attributes["step"]
            attributes.update(kept)

    def run_step(self, step: int, batch: Sequence[MicroBatch]) -> StepReport:
        """Make one step of the trainer, and observe it."""
        self._step, self._batch, self._is_clipped = step, batch, False
        with suspended_modes():
            self.of_parameters.begin_step(step)
            self.handler.begin_step(step)
            self.handler.loss_scale.begin_step()
            self.updates.begin_step()
        report = self.opened.trainer.step(copied(batch))
        if "optimizer" not in self.found.seen:
            self._observe_last_gradients()
        with suspended_modes():
            self._observe_losses()
            if "clip" in self.opened.invisible_phases:
                self._note_norm(torch.tensor([[report.grad_norm]]))
            self.taps.finish_backward()
        self.updates.end_step()
        self.handler.end_step()
        return report

    def _compute_loss(
        self, original: Callable[..., Any], *args: object, **kwargs: object
    ) -> Tensor:
        self.found.seen.add("forward")
        batch = args[0] if args else kwargs.get("micro_batch")
        numbers = self._begin_micro_batch(self._find_micro_batch(batch), batch)
        with self.tracer.unpaused():
            loss = original(*args, **kwargs)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UsageError(
                f"compute_loss of {type(self.opened.trainer).__name__} returned"
                f" {_described(loss)}; it must return one number with its graph"
            )
        with suspended_modes():
            self._losses.append((numbers, loss.detach().reshape(1, 1)))
        return self.taps.join(loss)

    def _observe_losses(self) -> None:
        """Observe the results of `compute_loss`, once backward has shown their factor."""
        scale = self.handler.loss_scale.of_loss
        for numbers, loss in self._losses:
            dtype = str(loss.dtype).removeprefix("torch.")
            stage = Stage("", "forward")
            addresses = [ValueAddress(stage, "loss", number, dtype=dtype) for number in numbers]
            value = loss if scale == 1 else loss.double() / scale
            if len(addresses) == 1:
                self.handler.observe(addresses[0], value)
            else:  # of micro-batches that ran as one
                self.handler.observe_sum(addresses, value)
        self._losses.clear()

    @property
    def _done(self) -> list[int]:
        """Numbers of the micro-batches that have begun in this step."""
        return [number for step, number in self.found.micro_batches_run if step == self._step]

    def _begin_micro_batch(self, own: int | PackedBatch, batch: object) -> tuple[int, ...]:
        """Begin a micro-batch, or several that run as one; return their numbers."""
        numbers = own.micro_batches if isinstance(own, PackedBatch) else (own,)
        self.found.clipped_early += [self._step] * self._is_clipped
        self.found.micro_batches_run += [(self._step, number) for number in numbers]
        timeline = None
        if isinstance(batch, Mapping) and main_input(batch) is not None:
            with suspended_modes():
                timeline = timeline_of(batch, own, self.rows, self._step)
                observe_labels(self.handler, batch, own, self._batch)
        self.tracer.begin_batch(numbers[0], timeline, self._step)
        with suspended_modes():
            # Dropout masks must not depend on the random numbers of earlier micro-batches.
            name = f"generator.{numbers[0]}"
            state = self.handler.observe_state(name, torch.get_rng_state())
            torch.set_rng_state(state)
            # SpecAugment draws its masks from numpy's.
            seed = zlib.crc32(state.numpy().tobytes())
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002 - models draw from the global generator
        return numbers

    def _begin_root_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Begin a micro-batch as the model is called, for a trainer without `compute_loss`."""
        del module
        batch = {"input_ids": args[0]} | kwargs if args else kwargs
        is_training = torch.is_grad_enabled() and main_input(batch) is not None
        if is_training and len(self._done) < len(self._batch):
            self._begin_micro_batch(self._find_micro_batch(batch), batch)

    def _find_micro_batch(self, batch: object) -> int | PackedBatch:
        """Find the number of a micro-batch, or of those packed into it; they come in order."""
        del batch
        return len(self._done)

    def _end_pass(self) -> bool:
        """End a backward pass; return True if it is known to be the last one of the step."""
        return False

    def _backward(self, original: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        self.found.seen.add("backward")
        before = torch.get_rng_state()
        with self.tracer.unpaused():
            result = original(*args, **kwargs)
        with suspended_modes():
            self.of_gradients.drew_in_backward |= not torch.equal(before, torch.get_rng_state())
            self._observe_losses()
            is_last = self._end_pass()
            self.taps.finish_backward()
            self.of_parameters.end_micro_batch(self.opened.trainer.model)
        # A later method shows the end of backward better: hooks may still change gradients.
        later = {PHASE_METHODS["reduce"], PHASE_METHODS["clip"]}
        if is_last and later.isdisjoint(self.opened.methods):
            self._observe_gradients("backward")
        return result

    def _run_schedule(
        self,
        original: Callable[..., Any],
        batch: Sequence[MicroBatch],
        *args: object,
        **kwargs: object,
    ) -> object:
        """Observe the schedule of a pipeline, in which each call of its stage is a micro-batch."""
        self.found.seen |= {"forward", "backward"}

        def begin(module: nn.Module, inputs: object) -> None:
            del module, inputs
            micro_batch = batch[len(self._done)]
            self._begin_micro_batch(self._find_micro_batch(micro_batch), micro_batch)

        handle = self.opened.root.register_forward_pre_hook(begin, prepend=True)
        try:
            with self.tracer.unpaused():
                result: object = original(batch, *args, **kwargs)
        finally:
            handle.remove()
        with suspended_modes():
            self.taps.finish_backward()
        return result

    def _reduce(self, original: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        self.found.seen.add("reduce")
        self._observe_gradients("backward")
        result = original(*args, **kwargs)
        self._observe_gradients("reduce")
        return result

    def _clip(self, original: Callable[P, Norm], *args: P.args, **kwargs: P.kwargs) -> Norm:
        self.found.seen.add("clip")
        self._observe_gradients("backward")
        norm = original(*args, **kwargs)
        self._is_clipped = True
        if "clip" in self._late:
            return norm
        with suspended_modes():
            value = whole(norm.detach()) if isinstance(norm, Tensor) else norm
            value = torch.as_tensor(value, dtype=torch.float64).reshape(1, 1)
            self._note_norm(value)
            self.handler.observe(self._address_of_norm, value)
        self._observe_gradients("clip")
        return norm

    def _note_norm(self, value: Tensor) -> None:
        expected = self.handler.find(self._address_of_norm)
        if expected is not None:
            self.handler.loss_scale.note_norm(float(value.cpu() / expected))

    @property
    def _address_of_norm(self) -> ValueAddress:
        first = next(p for p in self.opened.trainer.model.parameters() if p.is_floating_point())
        dtype = str(first.dtype).removeprefix("torch.")
        return ValueAddress(Stage("", "clip"), NORM, dtype=dtype)

    def _optimize(self, original: Callable[..., R], *args: object, **kwargs: object) -> R:
        """Observe the trainer's `optimizer_step`, and without one the step of its optimizer.

        The optimizer may call a closure first, which computes the gradients.
        """
        is_outer, self._is_updating = not self._is_updating, True
        named = {"closure": args[0], **kwargs} if args else kwargs
        if callable(closure := named.get("closure")):
            args, kwargs = (), named | {"closure": partial(self._close, closure)}
        elif is_outer and self._done:
            self._observe_last_gradients()
        if not is_outer:
            return original(*args, **kwargs)
        parameters = self.updates.trained()
        try:
            result = original(*args, **kwargs)
        finally:
            self._is_updating = False
        if "optimizer" not in self._late:
            self.found.seen.add("optimizer")
            self.updates.observe_updates(parameters)
        return result

    def _close(self, closure: Callable[[], R]) -> R:
        result = closure()
        self._observe_last_gradients()
        return result

    def _observe_last_gradients(self) -> None:
        """Observe the gradients that the optimizer gets, which are clipped if no method does that."""
        phase: Phase = "backward"
        model, own = self.opened.trainer.model, self.of_parameters
        if not {"clip", PHASE_METHODS["clip"]} & (self._late | self.opened.methods.keys()):
            with suspended_modes():
                phase = own.last_phase(model, self.handler.find(self._address_of_norm))
        if phase == "clip":
            if own.is_next("backward") and "backward" in self.found.seen:
                self.found.hidden["backward"] = "no method shows its end: clip_gradients would"
            self.found.seen.add("clip")
            self.handler.skip(self._address_of_norm)
        self._observe_gradients(phase)

    def _observe_gradients(self, phase: Phase) -> None:
        """Observe all gradients after `phase` once per step, and inject the reference's."""
        with suspended_modes():
            self.of_parameters.observe(self.opened.trainer.model, phase)


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return type(value).__name__


class ReplayedSteps(StepObserver):
    """Measures a trainer against a golden, whose values are injected into every stage.

    Call `run_step` inside of `attached()`, and `write` after the last step.

    pointwise: modules whose own code only rounds element by element.
    """

    def __init__(
        self,
        opened: OpenedTrainer,
        golden: Path,
        rows: RunRows,
        boundary: Boundary,
        pointwise: frozenset[str],
        untrained: frozenset[str] | None = None,
        scope: RankScope | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        scope, loss_scale = scope or RankScope(is_alone=True), loss_scale or LossScale()
        self._values = StageReplayer(golden, boundary, rows, scope=scope, loss_scale=loss_scale)
        # Maps micro-batches that run as one to those of the reference.
        self._packed = PackedTrace(self._values.trace)
        self.modules = GradientReplayer(
            self._packed,
            boundary,
            attention_of(opened.trainer.model),
            pointwise,
            layout=scope.layout,
            partial_modules=scope.partial_modules,
            unmeasured=opened.traits.unmeasured_ports,
            loss_scale=loss_scale,
        )
        super().__init__(opened, self._values, self.modules, rows, untrained)
        self._sums = GradientSums(
            boundary.rounded,
            scope.summed_by_backward,
            self.modules.micro_batches_begun,
            self.of_gradients,
        )
        # Measurements of a step that is skipped later are discarded.
        owners: list[tuple[Any, Sequence[str]]] = [
            (self.modules, ("results", "recomputed", "gradients", "scales", "labels")),
            (self._values, ("results",)),
            (self.found, ("micro_batches_run", "clipped_early")),
            (self.of_gradients, list(vars(self.of_gradients))),
            (self.updates, ("moved",)),
            (loss_scale, ("steps",)),
        ]
        self._measured = [(owner, name) for owner, names in owners for name in names]
        self.recording: Callable[[int], AbstractContextManager[object]] = nullcontext
        """Returns the context of a step."""

    def run_step(self, step: int, batch: Sequence[MicroBatch]) -> StepReport:
        """Make one step, and measure it."""
        self._sums.begin_step(self.updates.trained())
        with self.recording(step):
            report = super().run_step(step, batch)
        self.of_gradients.shares += self._shares_of(step)
        if self._sums.kept[1]:
            self.of_gradients.kept.append(KeptGradients(step, *self._sums.kept))
        return report

    def _find_micro_batch(self, batch: object) -> int | PackedBatch:
        if not isinstance(batch, Mapping) or main_input(batch) is None:
            return len(self._done)
        with suspended_modes():
            order: Literal["as given", "any"] = "as given" if self.handler.scope.is_alone else "any"
            return find_micro_batch(batch, self._batch, self._done, order)

    def _begin_micro_batch(self, own: int | PackedBatch, batch: object) -> tuple[int, ...]:
        if isinstance(own, PackedBatch):
            self._packed.pack(self._step, own)
        numbers = super()._begin_micro_batch(own, batch)
        self.handler.scope.micro_batches_run |= {(self._step, number) for number in numbers}
        self.modules.source = BatchSource(numbers[0])
        return numbers

    def _end_pass(self) -> bool:
        self._sums.end_pass(self.updates.trained())
        return self._sums.num_passed == len(self._batch)

    def _observe_gradients(self, phase: Phase) -> None:
        """Compare the sums too. Gradients that are no longer in `.grad` are used elsewhere, not seen."""
        trained = self.updates.trained()
        if self._sums.has_gradients and all(item.tensor.grad is None for item in trained):
            self.found.hidden[phase] = "`.grad` is empty when it ends"
            return
        if self.of_parameters.is_next("backward"):
            with suspended_modes():
                self._sums.compare(trained, is_clipped=phase == "clip")
        super()._observe_gradients(phase)

    def _shares_of(self, step: int) -> list[GradientShare]:
        """Return how often each micro-batch is in the step's gradients; empty if no loss shows it."""
        scales = {one.micro_batch: one for one in self.modules.scales if one.step == step}
        if not scales or self.packings:
            return []
        found = []
        for at, number in dict.fromkeys(self.found.micro_batches_run):
            if at == step and (step, number) in self.rows.numbers:
                of_loss = scales[number].length if number in scales else 0.0
                found.append(
                    GradientShare(step, number, of_loss * self._sums.in_sum.get(number, 1.0))
                )
        return found

    def measured(self) -> list[Any]:
        """Copy all measurements so far."""
        return copy.deepcopy([getattr(owner, name) for owner, name in self._measured])

    def go_back_to(self, measured: list[Any]) -> None:
        """Restore a copy of what `measured` returned, so that a skipped step can be discarded."""
        for (owner, name), value in zip(self._measured, copy.deepcopy(measured), strict=True):
            setattr(owner, name, value)

    @property
    def packings(self) -> list[PackedBatch]:
        """Micro-batches that were run as one."""
        return list(self._packed.packings.values())

    def write(self, writer: TraceWriter) -> None:
        """Attach all measurements, and finish the findings."""
        self.found.packed = sorted({packing.micro_batches for packing in self.packings})
        self.found.usage = Usage.model_validate(self.usage.to_json())
        for name, result in self.finish().items():
            attach_results(writer, name, result)

    def finish(self) -> dict[str, ReplayResults]:
        """Return all measurements by name. Called once, after the last step."""
        results = {f"stage-{phase}": self._values.results[phase] for phase in PHASES}
        modules = self.modules
        results["modules"] = modules.finish(self.handler.scope.is_own_call)
        results |= {"recomputed": modules.recomputed, "gradients": modules.gradients}
        for result in results.values():
            result.flush()
        return results


# Number of a micro-batch, number of its row, the row's token ids without padding, their first column.
_Row = tuple[int, int, Tensor, int]


def find_micro_batch(
    batch: Mapping[str, Tensor],
    known: Sequence[MicroBatch],
    done: Collection[int],
    order: Literal["as given", "any"],
) -> int | PackedBatch:
    """Find the micro-batch of a step that `batch` equals, or those packed into it.

    A batch with other content counts as the next micro-batch, with wrong inputs.

    done: numbers of micro-batches that have run.
    order: the order in which this process runs them.
    """
    name = main_input(batch)
    own = batch[name].cpu()
    for number, one in enumerate(known):
        if number not in done and name in one and torch.equal(one[name].to(own.dtype), own):
            return number if order == "any" else len(done)
    is_text = {"input_ids", "attention_mask"} <= known[0].keys()
    return (find_packing(batch, known, done) if is_text else None) or len(done)


def main_input(batch: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a name, or None
    """Return the argument that identifies a micro-batch: its token ids, or the tensor of a model without text."""
    others = (name for name in batch if name != "labels")
    return "input_ids" if "input_ids" in batch else next(others, None)


def timeline_of(
    batch: Mapping[str, Tensor], own: int | PackedBatch, rows: RunRows, step: int
) -> BatchPositions:
    """Map the tokens of `batch` to rows of the run and positions in them."""
    if not isinstance(own, PackedBatch):
        tokens = find_tokens(dict(batch))
        num_rows = len(batch[main_input(batch)])
        positions = torch.zeros(num_rows, 1, dtype=torch.long)  # of a model without tokens
        if tokens is not None:
            positions = BatchPositions.of_call(tokens.values, tokens.mask).positions
        return BatchPositions(rows.of_micro_batch(step, own, num_rows), positions)
    ids = batch["input_ids"]
    numbers, positions = [-1] * own.num_rows, torch.full(ids.shape, -1)
    for segment in own.segments:
        row = rows.of_micro_batch(step, segment.micro_batch, segment.row + 1)[segment.row]
        if numbers[segment.at_row] < 0:
            numbers[segment.at_row] = row
        positions[segment.at_row, segment.columns] = torch.arange(segment.length)
    return BatchPositions(tuple(numbers), positions)


def observe_labels(
    handler: StepValueHandler,
    batch: Mapping[str, Tensor],
    own: int | PackedBatch,
    known: Sequence[MicroBatch],
) -> None:
    """Pass the labels of `batch` to the handler, for packed micro-batches one by one.

    The first label of each row of a decoder has no effect and counts as masked.
    """
    labels, ids = batch.get("labels"), batch.get("input_ids")
    if labels is None:
        return
    if ids is not None and labels.shape == ids.shape:
        labels = labels.clone()
        labels[:, 0] = IGNORED
    packed = unpacked_labels(labels, own, known) if isinstance(own, PackedBatch) else None
    number = own.number if isinstance(own, PackedBatch) else own
    for index, value in (packed or {number: labels}).items():
        handler.observe(ValueAddress(Stage("", "inputs"), "labels", index), value)


def find_packing(
    batch: Mapping[str, Tensor], known: Sequence[MicroBatch], done: Collection[int]
) -> PackedBatch | None:
    """Find how `batch` is composed of whole micro-batches; None if it is not.

    Each row consists of one or several of their rows, end to end, with or without padding around.
    """
    left: list[_Row] = [
        (number, row, one["input_ids"][row][mask_T != 0], int(mask_T.argmax()))
        for number, one in enumerate(known)
        if number not in done
        for row, mask_T in enumerate(one["attention_mask"])
    ]
    # Of rows with a common beginning, match the longest.
    left.sort(key=lambda item: -len(item[2]))
    ids_BT = batch["input_ids"].cpu()
    bounds_B = _bounds(batch, ids_BT)
    segments: list[Segment] = []
    for at_row, (ids_T, (begin, end)) in enumerate(zip(ids_BT, bounds_B, strict=True)):
        column = begin
        while column < end:
            rest_T = ids_T[column:end]
            matches = (item for item in left if torch.equal(item[2], rest_T[: len(item[2])]))
            if (found := next(matches, None)) is None:
                return None
            left = [item for item in left if item is not found]
            number, row, tokens, start = found
            segments.append(Segment(number, row, len(tokens), at_row, column, start))
            column += len(tokens)
    packing = PackedBatch(tuple(segments), *ids_BT.shape)
    of_rest = {number for number, *_ in left}
    if not segments or of_rest & set(packing.micro_batches):
        return None
    return packing


def unpacked_labels(
    labels_BT: Tensor, packing: PackedBatch, known: Sequence[MicroBatch]
) -> dict[int, Tensor] | None:
    """Return the labels of each micro-batch in its own shape; None if padding has labels."""
    labels_BT = labels_BT.cpu()
    rest_BT = labels_BT.clone()
    found = {
        number: torch.full_like(known[number]["labels"], IGNORED)
        for number in packing.micro_batches
    }
    for segment in packing.segments:
        own = labels_BT[segment.at_row, segment.columns]
        found[segment.micro_batch][segment.row, segment.recorded_columns] = own
        rest_BT[segment.at_row, segment.columns] = IGNORED
    return None if bool((rest_BT != IGNORED).any()) else found


def _bounds(batch: Mapping[str, Tensor], ids_BT: Tensor) -> list[tuple[int, int]]:
    """Return the first and end column of the tokens of each row, without padding around them."""
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.shape != ids_BT.shape:
        return [(0, ids_BT.shape[1])] * len(ids_BT)
    tokens_B = [row.nonzero()[:, 0].tolist() for row in mask.cpu()]
    return [(columns[0], columns[-1] + 1) if columns else (0, 0) for columns in tokens_B]
