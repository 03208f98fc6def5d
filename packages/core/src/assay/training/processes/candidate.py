"""Runs the candidate's trainer, in its own process or on one rank, and measures it.

This process never judges: a setup function may have patched anything in it.
"""

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from assay.devices.registry import describe_run, open_run
from assay.devices.run_string import parse_run
from assay.dtypes import float_format
from assay.errors import UsageError
from assay.hooks.tensors import Boundary
from assay.launch import Rank
from assay.models import count_parameters, load_model
from assay.models.inspect.inspection import inspect_load
from assay.models.inspect.report import LoadReport
from assay.models.load import choose_threads
from assay.plugins import load_object
from assay.progress import advance_task
from assay.replay.gradients import GradientScale, LossScale, is_scaled_alike
from assay.replay.trace_views import PackedBatch
from assay.runs import Progress
from assay.runs.provenance import describe_python
from assay.runs.results import rank_folder
from assay.sites import unwrapped_path
from assay.trace import TraceWriter
from assay.training.batches import Batches, with_first_labels
from assay.training.model_batches import TrainingData
from assay.training.processes.free_run import run_freely, step_until_made
from assay.training.protocol import COMPILE, LOSS_SCALING, OF_NAMED_PIPELINES, PACKED, Shapes
from assay.training.replay.determinism import comparable, keep_no_cache
from assay.training.replay.step_observer import ReplayedSteps
from assay.training.replay.step_values import RankScope, RunRows
from assay.training.reports import (
    FreeRun,
    ModelReport,
    TrainCheck,
    TrainerReport,
    scaled_folder,
)
from assay.training.state.files import POINTWISE, UNTRAINED, read_golden_state, read_names
from assay.training.state.parameters import PartialSums, named_parameters, whole
from assay.training.state.states import (
    State,
    collect_state,
    current_state,
    differences,
    differing_parameters,
    generator_states,
    inject_state,
    measure_buffers,
    measure_changes,
    shared_parameters,
    unsaved_buffers,
)
from assay.training.trainers.registry import (
    OpenedTrainer,
    declared_traits,
    describe_trainer,
    open_trainer,
    pipeline_shapes_of,
    stated_plan_of,
    try_trainer,
)

if TYPE_CHECKING:
    from assay.training.protocol import Trainer
    from assay.training.reports import StateValue


@dataclass(frozen=True, slots=True)
class InitialState:
    """The state before the first step."""

    golden: State
    """The part of the golden's state that this process has."""
    own: State
    absent: list[str]
    """Parameters and buffers of the model that this process does not have."""
    different: list[str]
    """Parameters and buffers, but for an adapter's, that differ from the golden's."""


class CandidateSide:
    """Opens trainers of a candidate, and trains them freely."""

    def __init__(self, request: TrainCheck, rank: Rank | None) -> None:
        self._request, self._rank = request, rank
        self.run = parse_run(request.candidate)
        self.device = open_run(self.run) if rank is None else rank.device
        self.golden = request.golden
        self.data = TrainingData.read(request.golden)
        self.plan = request.options.model_copy(update={"loss": self.data.loss}).plan(
            request.candidate if rank is None else f"{rank.device.name}/{self.run.dtype}",
            request.setup,
            request.mesh,
            request.features,
        )
        # Comes before any setup function, which may choose another number for all later trainers.
        choose_threads(count_parameters(request.options.model))

    @cached_property
    def batches(self) -> Batches:
        """Plan the batches of all steps."""
        batches = self.data.batches
        if PACKED not in self.plan.features:
            return batches
        if not self.data.is_text:
            raise UsageError(
                f"--packed lays texts of a decoder end to end: it is not for the {self.plan.loss} loss"
                " of other inputs"
            )
        return [[with_first_labels(one) for one in batch] for batch in batches]

    @property
    def num_free_steps(self) -> int:
        """Count the steps of `train_freely`, including those resumed from the checkpoint."""
        return 2 * len(self.batches) - self._request.options.resume_at

    @property
    def coordinates(self) -> dict[str, int]:
        """Coordinates of this process on the mesh."""
        if self._rank is None:
            return {}
        return {axis: self._rank.mesh.get_local_rank(axis) for axis in self._rank.axes}

    def open(self) -> OpenedTrainer:
        """Open a fresh trainer of the candidate."""
        return open_trainer(self._request.trainer, self.plan)

    def begin(self, opened: OpenedTrainer) -> InitialState:
        """Return the initial state: the candidate's own weights, with the reference's adapter.

        Random initial values of an adapter depend on the dtype.
        """
        complete = read_golden_state(self.golden, 0)
        golden = self.own_part(opened, complete)
        own = collect_state(opened.trainer, self.device.torch_device)["model"]
        drawn = {name: value for name, value in golden["model"].items() if ".lora_" in name}
        absent = sorted(complete["model"].keys() - golden["model"].keys())
        differing = differing_parameters(golden, opened.trainer.model)
        different = [name for name in differing if ".lora_" not in name]
        return InitialState(golden, golden | {"model": own | drawn}, absent, different)

    def train_freely(self, opened: OpenedTrainer, begin: InitialState) -> FreeRun:
        """Train every step, with a checkpoint in the middle, and once more from the checkpoint."""
        start = begin.own
        if self._rank is not None:  # each rank has its own generator states
            start = start | {"generators": generator_states(self.device.torch_device)}
        end = read_golden_state(self.golden, len(self.batches))
        with comparable(self.run.dtype, self.device):
            return run_freely(
                opened,
                self.open,
                self.batches,
                start,
                end,
                self._request,
                self.device.torch_device,
            )

    def _open_replay(self, loss_scale: LossScale | None) -> tuple[OpenedTrainer, ReplayedSteps]:
        """Open a fresh trainer, and what measures its steps; `loss_scale` is divided out of them."""
        opened = self.open()
        keep_no_cache(opened.trainer.model)
        boundary = Boundary.exact_inputs_for(getattr(torch, self.run.dtype))
        pointwise, untrained = (read_names(self.golden, kind) for kind in (POINTWISE, UNTRAINED))
        rows, scope = RunRows.of_batches(self.batches), self.rank_scope(opened)
        steps = ReplayedSteps(
            opened, self.golden, rows, boundary, pointwise, untrained, scope, loss_scale
        )
        return opened, steps

    def own_part(self, opened: OpenedTrainer, state: State) -> State:
        """Return the part of a state that this process has."""
        return self.rank_scope(opened).own_part(state)

    def rank_scope(self, opened: OpenedTrainer) -> RankScope:
        """Return the scope of this process."""
        if self._rank is None:
            return RankScope(is_alone=True)
        axes, mesh, traits = self._rank.axes, self._rank.mesh, opened.traits
        over_ranks = PartialSums(mesh.get_group("dp")) if axes.get("dp", 1) > 1 else None
        reduces = "reduce" not in opened.invisible_phases
        held = frozenset(unwrapped_path(path) for path, _ in opened.trainer.model.named_modules())
        return RankScope(
            over_ranks if reduces else None,
            over_ranks if not reduces else None,
            traits.layout,
            held if traits.partial_modules else None,
            traits.partial_modules,
        )


def load_user_code(request: TrainCheck, _progress: Progress) -> tuple[Shapes, dict[str, Any]]:
    """Import the user's code, so that a typo costs no reference run.

    Returns: the micro-batch shapes that the trainer's pipelines accept, and the fields of the plan that it states.
    Raises: UsageError for code that a candidate could not run.
    """
    shapes: Shapes = OF_NAMED_PIPELINES
    stated: dict[str, Any] = {}
    if request.trainer is not None:
        try_trainer(request.trainer, prod(request.mesh.values()))
        shapes, stated = pipeline_shapes_of(request.trainer), stated_plan_of(request.trainer)
    if request.setup is not None:
        load_object(request.setup)
    return shapes, stated


def count_compiled_graphs() -> int:
    """Count the graphs that torch.compile has made in this process so far."""
    if "torch._dynamo" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def find_unapplied(
    features: Collection[str], packings: Sequence[PackedBatch], *, num_graphs: int, num_scaled: int
) -> list[str]:
    """Find the `features` without evidence in a run.

    packings: micro-batches that were run as one.
    num_graphs: number of compiled graphs.
    num_scaled: number of steps with a scaled loss, and of skipped steps.
    """
    seen = {
        PACKED: any(one.num_rows == 1 and len(one.segments) > 1 for one in packings),
        COMPILE: num_graphs > 0,
        LOSS_SCALING: num_scaled > 0,
    }
    return [feature for feature in seen if feature in features and not seen[feature]]


# Root mean squares of a few hundred random numbers are 5% apart.
_DRAWN_ALIKE = 1.5


def run_candidate(
    request: TrainCheck, progress: Progress, rank: Rank | None = None
) -> TrainerReport:
    """Run the candidate's trainer, or one rank of it.

    Measurements go into `request.folder`, and with several ranks into a subfolder for each.
    """
    return Candidate(request, progress, rank).run_all()


class Candidate(CandidateSide):
    """A candidate that is measured step by step."""

    def __init__(self, request: TrainCheck, progress: Progress, rank: Rank | None) -> None:
        super().__init__(request, rank)
        self._progress, self._skips = progress, False
        self._changed_by_skipping: set[StateValue] = set()

    def run_all(self) -> TrainerReport:
        """Inspect what is loaded, train freely, and replay every step."""
        # And one more phase where the trainer scales its loss.
        self._progress.number_phases(3)
        with self._progress.step("comparing what is loaded with the files"):
            load, buffers = self._inspect_load()
            if dist.is_initialized():
                dist.broadcast_object_list(sent := [buffers])
                (buffers,) = sent
        num_graphs = count_compiled_graphs()
        with self._progress.task(f"training freely on {self.run}", self.num_free_steps, "steps"):
            first = self.open()
            begin = self.begin(first)
            dtype, trained = getattr(torch, self.run.dtype), first.trainer.model
            changes = measure_changes(begin.golden, trained, begin.different, dtype)
            changed = measure_buffers(buffers, trained, dtype)
            changes.weights += changed.weights
            changes.replaced += changed.replaced
            model = ModelReport(
                load,
                [*begin.different, *(one.name for one in changed.weights), *changed.replaced],
                changes,
                _other_adapter_start(begin.golden, trained),
                absent=begin.absent,
            )
            free = self.train_freely(first, begin)
        num_graphs = count_compiled_graphs() - num_graphs
        num_skipped = sum(step.num_skipped for step in free.steps)
        self._skips = num_skipped > 0
        rank = self._rank
        folder = (
            self._request.folder if rank is None else rank_folder(self._request.folder, rank.number)
        )
        with self._progress.task("measuring every stage", len(self.batches), "steps"):
            opened, steps = self.replay(begin.own)
            self._write(steps, folder)
        trainer, found = opened.trainer, steps.found
        unit = float_format(self.run.dtype).unit_roundoff
        is_scaled = is_scaled_alike(_of_all_ranks(steps.modules.scales), unit)
        described = describe_run(self.device, self.run)
        described |= describe_python(self._request.python)
        described |= describe_trainer(self._request.trainer, self.plan, trainer.model)
        model.shared, model.moved = shared_parameters(trainer.model), steps.updates.moved
        _note_trained(trainer, begin.golden, model)
        trainer.teardown()
        scale = LossScale(unit, self.plan.mesh.get("dp", 1))
        if is_scaled:
            title = "measures every stage once more, without the loss scale"
            with self._progress.task(title, len(self.batches), "steps"):
                scaled, again = self.replay(begin.own, scale)
                self._write(again, scaled_folder(folder))
                scaled.trainer.teardown()
            # Sums in float16 lose small values without the scale, so this replay measures them.
            steps.of_gradients.errors_of_sums = again.of_gradients.errors_of_sums
        found.unapplied = find_unapplied(
            self.plan.features,
            steps.packings,
            num_graphs=num_graphs,
            num_scaled=is_scaled + num_skipped,
        )
        found.changed_by_skipping = sorted(self._changed_by_skipping)
        found.logit_gradients, found.labels = steps.modules.scales, steps.modules.labels
        found.scaled_steps = scale.steps
        return TrainerReport(
            run=described,
            free=free,
            coordinates=self.coordinates,
            traits=declared_traits(opened, found),
            model=model,
            replay=found,
            gradients=steps.of_gradients,
        )

    def _inspect_load(self) -> tuple[LoadReport | None, dict[str, Tensor]]:
        """Load the model without a trainer and inspect it; rank 0 only, as all run the same code.

        Returns: the report, and the buffers that no state holds.
        """
        if self._rank is not None and self._rank.number:
            return None, {}
        options = self._request.options
        loaded = load_model(
            options.model,
            dtype=self.run.dtype,
            device=self.device.torch_device,
            remote_code=options.remote_code,
        )
        buffers = {name: one.cpu() for name, one in unsaved_buffers(loaded.model).items()}
        return inspect_load(loaded, options.remote_code).report, buffers

    def replay(
        self,
        start: State,
        loss_scale: LossScale | None = None,
        observe: Callable[[ReplayedSteps], object] = lambda _: None,
    ) -> tuple[OpenedTrainer, ReplayedSteps]:
        """Replay a fresh trainer, and measure it.

        loss_scale: is divided out of them.
        observe: is called before the first step.
        """
        opened, steps = self._open_replay(loss_scale)
        observe(steps)
        torch_device = self.device.torch_device
        not_loaded = steps.found.not_loaded
        with steps.attached(), comparable(self.run.dtype, self.device):
            for number, batch in enumerate(self.batches):
                state = read_golden_state(self.golden, number) if number else start
                state = self.own_part(opened, state)
                lost = inject_state(opened.trainer, state, torch_device)
                not_loaded += [value for value in lost if value not in not_loaded]
                begin_again = None  # keeps a step that is skipped here and not in the free run
                if self._skips or loss_scale is not None:
                    begin_again = partial(self._forget, opened, state, steps, steps.measured())
                with opened.errors_in("step"):
                    step_until_made(partial(steps.run_step, number, batch), begin_again)
                advance_task("steps")
        return opened, steps

    def _write(self, steps: ReplayedSteps, folder: Path) -> None:
        with TraceWriter(folder, {"run": str(self.run)}) as writer:
            steps.write(writer)

    def _forget(
        self, opened: OpenedTrainer, state: State, steps: ReplayedSteps, measured: list[Any]
    ) -> None:
        """Discard a skipped step, and note the values that it changed."""
        torch_device = self.device.torch_device
        actual = current_state(opened.trainer, torch_device)
        self._changed_by_skipping |= {
            value
            for value in differences(state, actual)
            if value.part == "moments" or value.parameter in state["trainable"]
        }
        steps.go_back_to(measured)
        inject_state(opened.trainer, state, torch_device)


def _of_all_ranks(scales: list[GradientScale]) -> list[GradientScale]:
    if not dist.is_initialized():
        return scales
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, scales)
    return [scale for of_rank in gathered for scale in of_rank]


def _other_adapter_start(initial: State, model: nn.Module) -> list[str]:
    """List adapter parameters with another size, rank or repeated content than random ones have.

    Rows that depend on each other, or copies of another parameter, would stay so in training.
    """
    wrong, drawn = [], set()
    for item in named_parameters(model):
        if ".lora_" not in item.name or item.name not in initial["model"]:
            continue
        actual, expected = (
            value.cpu().double()
            for value in (whole(item.tensor.detach()), initial["model"][item.name])
        )
        size, usual = (float(value.pow(2).mean().sqrt()) for value in (actual, expected))
        ranks = [torch.linalg.matrix_rank(value) for value in (actual, expected)]
        content = actual.numpy().tobytes()
        if (
            not usual / _DRAWN_ALIKE <= size <= usual * _DRAWN_ALIKE
            or bool((ranks[0] < ranks[1]).any())
            or (size and content in drawn)
        ):
            wrong.append(item.name)
        drawn.add(content)
    return wrong


def _note_trained(trainer: "Trainer", initial: State, report: ModelReport) -> None:
    """Note in `report` the parameters that are trained here or in the reference only."""
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    for item in named_parameters(trainer.model):
        is_held, is_expected = id(item.tensor) in held, item.name in initial["trainable"]
        if is_expected and not is_held:
            report.not_in_optimizer.append(item.name)
        if is_expected and not item.tensor.requires_grad:
            report.frozen.append(item.name)
        is_trained = is_held and item.tensor.requires_grad and item.name in initial["model"]
        if is_trained and not is_expected:
            report.unexpectedly_trained.append(item.name)
