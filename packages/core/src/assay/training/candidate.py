"""The candidate process of a training check: runs the trainer as it is to be judged.

It never judges: a setup function may have patched anything in this process.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.recording.rounding import Border
from assay.runs import Progress
from assay.trace import TraceWriter
from assay.training.free_run import run_freely
from assay.training.golden import (
    Batches,
    ReplayedSteps,
    attention_of,
    comparable,
    keep_no_cache,
    plan_batches,
    read_golden_state,
    read_pointwise,
    use_few_threads,
)
from assay.training.observing import METHODS, named_parameters
from assay.training.opening import open_trainer
from assay.training.requests import CallScale, CandidateReport, CandidateRequest
from assay.training.states import (
    State,
    collect_state,
    differing_parameters,
    feed_state,
    shared_parameters,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from assay.devices.base import Device
    from assay.stages import TrainingPlan

_NAMES_SHOWN = 200


def run_candidate(request: CandidateRequest, progress: Progress) -> CandidateReport:
    """Run the candidate's trainer and write its measurements into `request.folder`."""
    return _Candidate(request, progress).run()


class _Candidate:
    def __init__(self, request: CandidateRequest, progress: Progress) -> None:
        self._request, self._progress = request, progress
        self._run = parse_run(request.candidate)
        self._device: Device = open_run(self._run)
        self._plan: TrainingPlan = request.options.plan(request.candidate, request.setup)
        self._golden = Path(request.golden)

    def run(self) -> CandidateReport:
        request, device = self._request, self._device
        batches = plan_batches(request.options)
        initial = read_golden_state(self._golden, 0)
        with self._progress.step(f"candidate: trains freely on {self._run}"):
            first = self._open()
            use_few_threads(sum(p.numel() for p in first.model.parameters()))
            start = self._starting_state(first, initial)
            different = self._own_weights_that_differ(first.model, initial)
            with comparable(self._run.dtype, device):
                free = run_freely(first, self._open, batches, start, request, device.torch_device)
        with self._progress.step("candidate: every stage is measured"):
            trainer = self._open()
            keep_no_cache(trainer.model)
            attention = attention_of(trainer.model)
            steps, not_taken = self._replay(trainer, batches, start, attention)
        with TraceWriter(request.folder, {"run": str(self._run)}) as writer:
            steps.write(writer)
        report = CandidateReport(
            run={
                "run": str(self._run),
                "device": device.product(),
                "architecture": device.architecture(),
                "effective_precision": device.effective_precision(self._run.dtype),
                "attention": attention,
                "trainer": request.trainer or "reference",
                "setup": request.setup,
                "versions": dict(device.versions()),
            },
            free=free,
            seen=steps.seen,
            invisible=_invisible(trainer),
            weights_different=different[:_NAMES_SHOWN],
            not_in_optimizer=_not_in_optimizer(trainer, initial)[:_NAMES_SHOWN],
            strayed=_strayed(trainer, initial)[:_NAMES_SHOWN],
            shared=shared_parameters(trainer.model),
            drew_in_backward=steps.drew_in_backward,
            not_taken=not_taken[:_NAMES_SHOWN],
            logit_gradients=[CallScale.model_validate(row) for row in steps.scales],
        )
        trainer.teardown()
        return report

    def _open(self) -> Any:  # noqa: ANN401 - any trainer
        """A trainer after its set-up."""
        return open_trainer(self._request.trainer, self._plan)

    def _starting_state(self, trainer: Any, initial: State) -> State:  # noqa: ANN401
        """What the first step starts from: the candidate's own weights, the reference's adapter.

        An adapter is drawn at random, in another dtype with other numbers.
        """
        own = collect_state(trainer, self._device.torch_device)["model"]
        drawn = {name: value for name, value in initial["model"].items() if ".lora_" in name}
        return initial | {"model": own | drawn}

    def _own_weights_that_differ(self, model: nn.Module, initial: State) -> list[str]:
        return [name for name in differing_parameters(initial, model) if ".lora_" not in name]

    def _replay(
        self,
        trainer: Any,  # noqa: ANN401
        batches: Batches,
        start: State,
        attention: str,
    ) -> tuple[ReplayedSteps, list[str]]:
        border = Border.exact_inputs_for(getattr(torch, self._run.dtype))
        pointwise = read_pointwise(self._golden)
        steps = ReplayedSteps(trainer, self._golden, border, attention, pointwise)
        not_taken: list[str] = []
        with steps.attached(), comparable(self._run.dtype, self._device):
            for number, batch in enumerate(batches):
                state = read_golden_state(self._golden, number) if number else start
                lost = feed_state(trainer, state, self._device.torch_device)
                not_taken += [path for path in lost if path not in not_taken]
                steps.run_step(number, batch)
        return steps, not_taken


def _invisible(trainer: Any) -> dict[str, str]:  # noqa: ANN401 - any trainer
    """Phases that nobody can observe, each with the reason."""
    declared: Mapping[str, str] = getattr(trainer, "invisible_stages", {})
    absent = {
        phase: f"the trainer has no method {name}"
        for phase, name in METHODS.items()
        if not callable(getattr(trainer, name, None))
    }
    return absent | dict(declared)


def _strayed(trainer: Any, initial: State) -> list[str]:  # noqa: ANN401
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


def _not_in_optimizer(trainer: Any, initial: State) -> list[str]:  # noqa: ANN401
    """Parameters of the model that the reference trains and this optimizer does not hold."""
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    return [
        item.name
        for item in named_parameters(trainer.model)
        if id(item.tensor) not in held and item.name in initial["trainable"]
    ]
