"""The candidate process of a training check: runs the trainer as it is to be judged.

It never judges: a setup function may have patched anything in this process.
"""

import copy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from assay.devices.registry import describe_run, open_run
from assay.devices.run_string import parse_run
from assay.dtypes import float_format
from assay.hooks.values.boundary import Boundary
from assay.launch import Rank
from assay.locating.loss_scale import GradientScale, LossScale, is_scaled_alike
from assay.models import estimate_size, load_model
from assay.models.loaded.inspection import inspect_load
from assay.models.loaded.report import LoadReport
from assay.models.loading.configs import attention_of
from assay.models.size_policy import choose_threads
from assay.runs import Progress
from assay.sites import unwrapped_path
from assay.trace import TraceWriter
from assay.training.processes.free_run import run_freely
from assay.training.processes.golden import (
    Batches,
    plan_batches,
    read_golden_state,
    read_pointwise,
    read_untrained,
)
from assay.training.processes.requests import (
    CandidateReport,
    CandidateRequest,
    GradientNormRecord,
    LogitGradientScale,
    ScaledStepRecord,
    rank_folder,
    scaled_folder,
)
from assay.training.processes.skipped_steps import step_until_made
from assay.training.replay.conditions import comparable, keep_no_cache
from assay.training.replay.rank_view import RankView
from assay.training.replay.replayed_steps import Measured, ReplayedModel, ReplayedSteps
from assay.training.replay.run_rows import RunRows
from assay.training.state.generators import generator_states
from assay.training.state.parameters import named_parameters
from assay.training.state.records import StateValue
from assay.training.state.sharding import PartialSums, whole
from assay.training.state.states import (
    State,
    collect_state,
    differences,
    differing_parameters,
    inject_state,
    measure_changes,
    shared_parameters,
)
from assay.training.trainers.registry import (
    OpenedTrainer,
    describe_trainer,
    open_trainer,
)

if TYPE_CHECKING:
    from assay.devices.base import Device
    from assay.training.protocol import Trainer, TrainingPlan

# Root mean squares of a few hundred random numbers are 5% apart.
_DRAWN_ALIKE = 1.5


def run_candidate(
    request: CandidateRequest, progress: Progress, rank: Rank | None = None
) -> CandidateReport:
    """Run the candidate's trainer, or one rank of it, and write what it measured.

    Into `request.folder`, of several ranks each into a folder of its own there.
    """
    return _Candidate(request, progress, rank).run()


class _Candidate:
    def __init__(self, request: CandidateRequest, progress: Progress, rank: Rank | None) -> None:
        self._request, self._progress, self._rank = request, progress, rank
        self._run = parse_run(request.candidate)
        self._device: Device = open_run(self._run) if rank is None else rank.device
        self._plan: TrainingPlan = request.options.plan(
            request.candidate if rank is None else f"{rank.device.name}/{self._run.dtype}",
            request.setup,
            request.mesh,
            request.features,
        )
        self._golden = Path(request.golden)
        self._skips = False
        self._changed_by_skipping: set[StateValue] = set()

    def run(self) -> CandidateReport:
        request, device = self._request, self._device
        batches = plan_batches(request.options)
        # Before any setup function, which may choose otherwise: then for all trainers of this run.
        choose_threads(estimate_size(request.options.model).num_parameters)
        with self._progress.step("candidate: is what is loaded what the files say?"):
            load = self._inspect_load()
        with self._progress.step(f"candidate: trains freely on {self._run}"):
            first = self._open()
            complete = read_golden_state(self._golden, 0)
            initial = self._own(first, complete)
            start = self._starting_state(first, initial)
            adapter_start = _other_adapter_start(initial, first.trainer.model)
            different = self._own_weights_that_differ(first.trainer.model, initial)
            dtype = getattr(torch, self._run.dtype)
            changes = measure_changes(initial, first.trainer.model, different, dtype)
            with comparable(self._run.dtype, device):
                end = read_golden_state(self._golden, len(batches))
                begin = start
                if self._rank is not None:  # what ranks draw, they draw from numbers of their own
                    begin = start | {"generators": generator_states(device.torch_device)}
                free = run_freely(
                    first, self._open, batches, begin, end, request, device.torch_device
                )
        self._skips = any(step.num_skipped for step in free.steps)
        with self._progress.step("candidate: every stage is measured"):
            opened = self._open()
            trainer = opened.trainer
            keep_no_cache(trainer.model)
            attention = attention_of(trainer.model)
            steps, not_loaded = self._replay(opened, batches, start, attention)
        folder = Path(request.folder)
        if self._rank is not None:
            folder = rank_folder(folder, self._rank.number)
        unit = float_format(self._run.dtype).unit_roundoff
        is_scaled = is_scaled_alike(_of_all_ranks(steps.scales), unit)
        with TraceWriter(folder, {"run": str(self._run)}) as writer:
            steps.write(writer)
        report = CandidateReport(
            run=describe_run(device, self._run)
            | describe_trainer(request.trainer, self._plan, trainer.model),
            free=free,
            seen=steps.seen,
            invisible=opened.invisible_phases,
            weights_different=different,
            changes=changes,
            load=load,
            not_in_optimizer=_not_in_optimizer(trainer, initial),
            unexpectedly_trained=_unexpectedly_trained(trainer, initial),
            shared=shared_parameters(trainer.model),
            drew_in_backward=steps.drew_in_backward,
            micro_batches_run=steps.micro_batches_run,
            coordinates=self._coordinates(),
            partial_modules=sorted(opened.traits.partial_modules),
            unmeasured=sorted(
                f"{module}:{port}" for module, port in opened.traits.unmeasured_ports
            ),
            absent=sorted(complete["model"].keys() - initial["model"].keys()),
            not_loaded=not_loaded,
            adapter_start=adapter_start,
            errors_of_sums=steps.sums.errors,
            sharded_gradients=steps.sums.num_sharded,
            narrow_gradients=steps.sums.num_narrow,
            updates_expected=steps.moved.num_expected,
            updates_made=steps.moved.num_moved,
            dropout_masks=opened.traits.dropout_masks,
            norms=[GradientNormRecord.model_validate(asdict(norm)) for norm in steps.norms],
            packed=sorted({packing.micro_batches for packing in steps.packings}),
            logit_gradients=[
                LogitGradientScale.model_validate(asdict(row)) for row in steps.scales
            ],
        )
        trainer.teardown()
        scale = LossScale(unit)
        if is_scaled:
            with self._progress.step("candidate: every stage once more, without its loss scale"):
                self._replay_scaled(batches, start, scale, scaled_folder(folder))
        update = {
            "scaled_steps": [ScaledStepRecord.model_validate(asdict(one)) for one in scale.steps],
            "changed_by_skipping": sorted(self._changed_by_skipping),
        }
        return report.model_copy(update=update)

    def _replay_scaled(
        self, batches: Batches, start: State, scale: LossScale, folder: Path
    ) -> None:
        """Replay a fresh trainer, with its loss scale divided out of what is measured."""
        opened = self._open()
        keep_no_cache(opened.trainer.model)
        attention = attention_of(opened.trainer.model)
        steps, _ = self._replay(opened, batches, start, attention, scale)
        with TraceWriter(folder, {"run": str(self._run)}) as writer:
            steps.write(writer)
        opened.trainer.teardown()

    def _inspect_load(self) -> LoadReport | None:
        """What loading gives in this process and on its device; on one rank, as all have the same code."""
        if self._rank is not None and self._rank.number:
            return None
        options = self._request.options
        loaded = load_model(
            options.model,
            dtype=self._run.dtype,
            device=self._device.torch_device,
            remote_code=options.remote_code,
        )
        return inspect_load(loaded, options.remote_code).report

    def _coordinates(self) -> dict[str, int]:
        if self._rank is None:
            return {}
        return {axis: self._rank.mesh.get_local_rank(axis) for axis in self._rank.axes}

    def _rank_view(self, opened: OpenedTrainer) -> RankView | None:
        """What the other ranks have of a step; None for a single process."""
        if self._rank is None:
            return None
        axes, mesh, traits = self._rank.axes, self._rank.mesh, opened.traits
        over_ranks = PartialSums(mesh.get_group("dp")) if axes.get("dp", 1) > 1 else None
        reduces = "reduce" not in opened.invisible_phases
        held = frozenset(unwrapped_path(path) for path, _ in opened.trainer.model.named_modules())
        return RankView(
            over_ranks if reduces else None,
            over_ranks if not reduces else None,
            traits.layout,
            held if traits.partial_modules else None,
            traits.partial_modules,
            traits.unmeasured_ports,
        )

    def _own(self, opened: OpenedTrainer, state: State) -> State:
        """The part of a state that this process has."""
        rank_view = self._rank_view(opened)
        return state if rank_view is None else rank_view.own_part(state)

    def _open(self) -> OpenedTrainer:
        """A trainer of the candidate, fresh after its `setup`."""
        return open_trainer(self._request.trainer, self._plan)

    def _starting_state(self, opened: OpenedTrainer, initial: State) -> State:
        """What the first step starts from: the candidate's own weights, the reference's adapter.

        An adapter is drawn at random, in another dtype with other numbers.
        """
        own = collect_state(opened.trainer, self._device.torch_device)["model"]
        drawn = {name: value for name, value in initial["model"].items() if ".lora_" in name}
        return initial | {"model": own | drawn}

    def _own_weights_that_differ(self, model: nn.Module, initial: State) -> list[str]:
        return [name for name in differing_parameters(initial, model) if ".lora_" not in name]

    def _replay(
        self,
        opened: OpenedTrainer,
        batches: Batches,
        start: State,
        attention: str,
        loss_scale: LossScale | None = None,
    ) -> tuple[ReplayedSteps, list[StateValue]]:
        boundary = Boundary.exact_inputs_for(getattr(torch, self._run.dtype))
        rank_view = self._rank_view(opened)
        model = ReplayedModel(attention, read_pointwise(self._golden), read_untrained(self._golden))
        rows = RunRows.of_batches(batches)
        steps = ReplayedSteps(opened, self._golden, rows, boundary, model, rank_view, loss_scale)
        not_loaded: list[StateValue] = []
        with steps.attached(), comparable(self._run.dtype, self._device):
            for number, batch in enumerate(batches):
                state = read_golden_state(self._golden, number) if number else start
                state = self._own(opened, state)
                lost = inject_state(opened.trainer, state, self._device.torch_device)
                not_loaded += [value for value in lost if value not in not_loaded]
                begin_again = _do_nothing
                if self._skips or loss_scale is not None:
                    begin_again = partial(self._forget, opened, state, steps, steps.measured())
                with opened.errors_in("step"):
                    step_until_made(partial(steps.run_step, number, batch), begin_again)
        return steps, not_loaded

    def _forget(
        self, opened: OpenedTrainer, state: State, steps: ReplayedSteps, measured: Measured
    ) -> None:
        """Begin a step anew that was skipped: nothing that the step depends on may have changed."""
        actual = collect_state(opened.trainer, self._device.torch_device)
        self._changed_by_skipping |= {
            value
            for value in differences(state, actual)
            if value.part == "moments" or value.parameter in state["trainable"]
        }
        steps.go_back_to(copy.deepcopy(measured))
        inject_state(opened.trainer, state, self._device.torch_device)


def _do_nothing() -> None:
    """Leave everything as it is: a step that is skipped only here is measured like any other."""


def _of_all_ranks(scales: list[GradientScale]) -> list[GradientScale]:
    if not dist.is_initialized():
        return scales
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, scales)
    return [scale for of_rank in gathered for scale in of_rank]


def _other_adapter_start(initial: State, model: nn.Module) -> list[str]:
    """Parameters of an adapter that do not start as the reference's: drawn alike, or zero.

    Each is drawn for itself, and no row of it follows from the others: it would never leave them.
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


def _unexpectedly_trained(trainer: "Trainer", initial: State) -> list[str]:
    """Parameters that this optimizer changes and the reference does not train."""
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    return [
        item.name
        for item in named_parameters(trainer.model)
        if id(item.tensor) in held
        and item.tensor.requires_grad
        and item.name in initial["model"]
        and item.name not in initial["trainable"]
    ]


def _not_in_optimizer(trainer: "Trainer", initial: State) -> list[str]:
    """Parameters of the model that the reference trains and this optimizer does not hold."""
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    return [
        item.name
        for item in named_parameters(trainer.model)
        if id(item.tensor) not in held and item.name in initial["trainable"]
    ]
