"""Runs the candidate's trainer, in its own process, and measures it.

This process never judges: a setup function may have patched anything in it.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from assay.comparing.coverage import Usage
from assay.devices.registry import describe_run
from assay.dtypes import float_format
from assay.hooks.values.boundary import Boundary
from assay.launch import Rank
from assay.locating.loss_scale import GradientScale, LossScale, is_scaled_alike
from assay.models import load_model
from assay.models.loaded.inspection import inspect_load
from assay.models.loaded.report import LoadReport
from assay.models.loading.configs import attention_of
from assay.progress import advance_task
from assay.runs import Progress
from assay.runs.results import rank_folder
from assay.trace import TraceWriter
from assay.training.processes.candidate_side import CandidateSide
from assay.training.processes.golden import POINTWISE, UNTRAINED, read_names
from assay.training.processes.requests import TrainCheck, scaled_folder
from assay.training.processes.skipped_steps import step_until_made
from assay.training.processes.trainer_report import (
    LossReport,
    ModelReport,
    OptimizerReport,
    TrainerReport,
    declared_traits,
)
from assay.training.processes.unapplied_features import count_compiled_graphs, find_unapplied
from assay.training.replay.conditions import comparable, keep_no_cache
from assay.training.replay.replayed_steps import ReplayedModel, ReplayedSteps
from assay.training.replay.run_rows import RunRows
from assay.training.state.files import read_golden_state
from assay.training.state.parameters import named_parameters
from assay.training.state.records import StateValue
from assay.training.state.sharding import whole
from assay.training.state.states import (
    State,
    current_state,
    differences,
    differing_parameters,
    inject_state,
    measure_changes,
    shared_parameters,
)
from assay.training.trainers.registry import OpenedTrainer, describe_trainer

if TYPE_CHECKING:
    from collections.abc import Callable

    from assay.training.protocol import Trainer

# Root mean squares of a few hundred random numbers are 5% apart.
_DRAWN_ALIKE = 1.5


def run_candidate(
    request: TrainCheck, progress: Progress, rank: Rank | None = None
) -> TrainerReport:
    """Run the candidate's trainer, or one rank of it.

    Measurements go into `request.folder`, and with several ranks into a subfolder for each.
    """
    return _Candidate(request, progress, rank).run()


class _Candidate:
    def __init__(self, request: TrainCheck, progress: Progress, rank: Rank | None) -> None:
        self._request, self._progress, self._rank = request, progress, rank
        self._side = CandidateSide(request, rank)
        self._skips = False
        self._changed_by_skipping: set[StateValue] = set()

    def run(self) -> TrainerReport:
        request, side = self._request, self._side
        device, run, plan = side.device, side.run, side.plan
        # And one more phase where the trainer scales its loss.
        self._progress.number_phases(3)
        with self._progress.step("compares what is loaded with the files"):
            load = self._inspect_load()
        num_graphs = count_compiled_graphs()
        with self._progress.task(f"trains freely on {run}", side.num_free_steps, "steps"):
            first = side.open()
            begin = side.begin(first)
            differing = differing_parameters(begin.golden, first.trainer.model)
            different = [name for name in differing if ".lora_" not in name]
            adapter_start = _other_adapter_start(begin.golden, first.trainer.model)
            changes = measure_changes(
                begin.golden, first.trainer.model, different, getattr(torch, run.dtype)
            )
            free = side.train_freely(first, begin)
        num_graphs = count_compiled_graphs() - num_graphs
        self._skips = any(step.num_skipped for step in free.steps)
        with self._progress.task("measures every stage", len(side.batches), "steps"):
            opened = side.open()
            trainer = opened.trainer
            keep_no_cache(trainer.model)
            attention = attention_of(trainer.model)
            steps, not_loaded = self._replay(opened, begin.own, attention)
        folder = request.folder
        if self._rank is not None:
            folder = rank_folder(folder, self._rank.number)
        unit = float_format(run.dtype).unit_roundoff
        is_scaled = is_scaled_alike(_of_all_ranks(steps.gradients.scales), unit)
        num_skipped = sum(step.num_skipped for step in free.steps)
        with TraceWriter(folder, {"run": str(run)}) as writer:
            steps.write(writer)
        described = describe_run(device, run)
        described |= describe_trainer(request.trainer, plan, trainer.model)
        optimizer = _optimizer_report(trainer, begin.golden, steps)
        shared = shared_parameters(trainer.model)
        trainer.teardown()
        scale, errors_of_sums = (
            LossScale(unit, plan.mesh.get("dp", 1)),
            steps.of_gradients.errors_of_sums,
        )
        if is_scaled:
            title = "measures every stage once more, without the loss scale"
            with self._progress.task(title, len(side.batches), "steps"):
                # Sums in float16 lose small values without the scale, so this replay measures them.
                again = self._replay_scaled(begin.own, scale, scaled_folder(folder))
                errors_of_sums = again.of_gradients.errors_of_sums
        return TrainerReport(
            run=described,
            free=free,
            coordinates=side.coordinates,
            traits=declared_traits(opened, steps.found),
            model=ModelReport(load, different, changes, adapter_start, shared, begin.absent),
            replay=replace(
                steps.found,
                packed=sorted({packing.micro_batches for packing in steps.packings}),
                unapplied=find_unapplied(
                    plan.features,
                    steps.packings,
                    num_graphs=num_graphs,
                    num_scaled=is_scaled + num_skipped,
                ),
                not_loaded=not_loaded,
                changed_by_skipping=sorted(self._changed_by_skipping),
                usage=Usage.model_validate(steps.watch.to_json()),
            ),
            loss=LossReport(steps.gradients.scales, steps.gradients.labels, scale.steps),
            gradients=replace(steps.of_gradients, errors_of_sums=errors_of_sums),
            optimizer=optimizer,
        )

    def _replay_scaled(self, start: State, scale: LossScale, folder: Path) -> ReplayedSteps:
        """Replay a fresh trainer, with its loss scale divided out of what is measured."""
        opened = self._side.open()
        keep_no_cache(opened.trainer.model)
        attention = attention_of(opened.trainer.model)
        steps, _ = self._replay(opened, start, attention, scale)
        with TraceWriter(folder, {"run": str(self._side.run)}) as writer:
            steps.write(writer)
        opened.trainer.teardown()
        return steps

    def _inspect_load(self) -> LoadReport | None:
        """Load the model without a trainer and inspect it; rank 0 only, as all run the same code."""
        if self._rank is not None and self._rank.number:
            return None
        options = self._request.options
        loaded = load_model(
            options.model,
            dtype=self._side.run.dtype,
            device=self._side.device.torch_device,
            remote_code=options.remote_code,
        )
        return inspect_load(loaded, options.remote_code).report

    def _replay(
        self,
        opened: OpenedTrainer,
        start: State,
        attention: str,
        loss_scale: LossScale | None = None,
    ) -> tuple[ReplayedSteps, list[StateValue]]:
        side = self._side
        torch_device = side.device.torch_device
        boundary = Boundary.exact_inputs_for(getattr(torch, side.run.dtype))
        scope = side.rank_scope(opened)
        pointwise, untrained = (read_names(side.golden, kind) for kind in (POINTWISE, UNTRAINED))
        model = ReplayedModel(attention, pointwise, untrained)
        rows = RunRows.of_batches(side.batches)
        steps = ReplayedSteps(opened, side.golden, rows, boundary, model, scope, loss_scale)
        not_loaded: list[StateValue] = []
        with steps.attached(), comparable(side.run.dtype, side.device):
            for number, batch in enumerate(side.batches):
                state = read_golden_state(side.golden, number) if number else start
                state = side.own_part(opened, state)
                lost = inject_state(opened.trainer, state, torch_device)
                not_loaded += [value for value in lost if value not in not_loaded]
                begin_again: Callable[[], None] = _keep_measurements
                if self._skips or loss_scale is not None:
                    begin_again = partial(self._forget, opened, state, steps, steps.measured())
                with opened.errors_in("step"):
                    step_until_made(partial(steps.run_step, number, batch), begin_again)
                advance_task("steps")
        return steps, not_loaded

    def _forget(
        self, opened: OpenedTrainer, state: State, steps: ReplayedSteps, measured: list[Any]
    ) -> None:
        """Discard a skipped step, and note the values that it changed."""
        torch_device = self._side.device.torch_device
        actual = current_state(opened.trainer, torch_device)
        self._changed_by_skipping |= {
            value
            for value in differences(state, actual)
            if value.part == "moments" or value.parameter in state["trainable"]
        }
        steps.go_back_to(measured)
        inject_state(opened.trainer, state, torch_device)


def _keep_measurements() -> None:
    """Count a step that is skipped here, although the free run skipped none."""


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


def _optimizer_report(trainer: "Trainer", initial: State, steps: ReplayedSteps) -> OptimizerReport:
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    report = OptimizerReport(moved=steps.updates.moved)
    for item in named_parameters(trainer.model):
        is_held, is_expected = id(item.tensor) in held, item.name in initial["trainable"]
        if is_expected and not is_held:
            report.not_in_optimizer.append(item.name)
        if is_expected and not item.tensor.requires_grad:
            report.frozen.append(item.name)
        is_trained = is_held and item.tensor.requires_grad and item.name in initial["model"]
        if is_trained and not is_expected:
            report.unexpectedly_trained.append(item.name)
    return report
