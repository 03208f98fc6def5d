"""Both sides of `assay check train --overfit`, each in its own process: they train, none judges."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from assay.comparing.coverage import Usage
from assay.devices.registry import describe_run, open_run
from assay.devices.run_string import parse_run
from assay.hooks.module_tracer import ModuleTracer, NullHandler
from assay.hooks.usage import UsageWatch
from assay.launch import Rank
from assay.models import estimate_size
from assay.models.size_policy import choose_threads, yardstick_dtype
from assay.progress import Progress, Task
from assay.training.batches import MicroBatch, check_batch
from assay.training.overfit.memorization import (
    load_weights,
    measure_memorization,
    read_trained,
    write_trained,
)
from assay.training.overfit.requests import (
    TRAINED,
    Curve,
    Memorization,
    MemorizationRequest,
    OverfitCandidate,
    OverfitReference,
)
from assay.training.processes.golden import plan_batches, read_golden_state, state_file
from assay.training.processes.requests import CandidateRequest, ReferenceRequest, TrainOptions
from assay.training.processes.trusted import Trusted, describe_model, trusted_trainer
from assay.training.protocol import Trainer
from assay.training.replay.conditions import comparable, keep_no_cache
from assay.training.state.files import write_state
from assay.training.state.generators import restore_generators
from assay.training.state.states import (
    State,
    collect_state,
    differing_parameters,
    inject_state,
    round_state,
)
from assay.training.trainers.registry import OpenedTrainer, describe_trainer, open_trainer

if TYPE_CHECKING:
    from assay.devices.base import Device
    from assay.training.protocol import Trainer

_ADAPTER = ".lora_"


def overfit_trusted(request: ReferenceRequest, progress: Progress) -> OverfitReference:
    """Overfit as yardstick and as noise run; what adapters start from goes to `request.folder`."""
    device = open_run(parse_run(request.reference))
    batch, options = plan_sequences(request.options), request.options
    wide = _wide_dtype(request, device)
    choose_threads(estimate_size(options.model).num_parameters)
    progress.number_phases(5)
    with progress.step(f"loads {options.model} in {wide}"):
        yardstick = _open_trusted(request, wide)
    model = yardstick.model
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    facts = describe_model(yardstick, options.model, num_parameters)
    initial = round_state(
        collect_state(yardstick, device.torch_device), getattr(torch, request.dtype)
    )
    write_state(state_file(Path(request.folder), 0), initial)
    drawn = torch.get_rng_state()
    inject_state(yardstick, initial, device.torch_device)
    with comparable(wide, device), progress.task("overfits", options.steps, "steps") as task:
        opened = OpenedTrainer.of(yardstick, "reference")
        curve, _ = _train(opened, batch, options.steps, task)
    draws = not torch.equal(drawn, torch.get_rng_state())
    watch = UsageWatch(NullHandler())
    watch.add_parameters_of(model)
    with (
        progress.step("measures what it has memorized"),
        ModuleTracer(watch).attached(model),
        watch.reading(),
    ):
        memorization = measure_memorization(
            model, [yardstick.on_device(micro_batch) for micro_batch in batch]
        )
    yardstick.teardown()

    with progress.step(f"noise run: loads {options.model} in {request.dtype}"):
        noise = _open_trusted(request, None)
    inject_state(noise, initial, device.torch_device)
    before = collect_state(noise, device.torch_device)["model"]
    title = "noise run: overfits"
    with comparable(request.dtype, device), progress.task(title, options.steps, "steps") as task:
        opened = OpenedTrainer.of(noise, "reference")
        noise_curve, _ = _train(opened, batch, options.steps, task)
    after = collect_state(noise, device.torch_device)["model"]
    shares = {name: _share_changed(before[name], after[name]) for name in before}
    return OverfitReference(
        model=facts,
        reference=describe_run(device, parse_run(request.reference)) | {"yardstick": wide},
        yardstick=curve,
        noise=noise_curve,
        memorization=memorization,
        num_tokens=check_batch(batch),
        trainable=initial["trainable"],
        # Most of it: what rounding leaves of a few elements does not carry over to another run.
        moved=sorted(name for name, share in shares.items() if 2 * share > 1),
        touched=sorted(name for name, share in shares.items() if share > 0),
        draws=draws,
        usage=Usage.model_validate(watch.to_json()),
    )


def overfit_candidate(
    request: CandidateRequest, progress: Progress, rank: Rank | None = None
) -> OverfitCandidate:
    """Overfit with the candidate's trainer, or one rank of it, and leave its weights."""
    run, options = parse_run(request.candidate), request.options
    device = open_run(run) if rank is None else rank.device
    plan = options.plan(
        request.candidate if rank is None else f"{device.name}/{run.dtype}",
        request.setup,
        request.mesh,
        request.features,
    )
    batch = plan_sequences(options)
    # Before any setup function, which may choose otherwise.
    choose_threads(estimate_size(options.model).num_parameters)
    progress.number_phases(2)
    with progress.step(f"loads {options.model} on {run}"):
        opened = open_trainer(request.trainer, plan)
    trainer = opened.trainer
    keep_no_cache(trainer.model)
    initial = read_golden_state(Path(request.golden), 0)
    start = _start(trainer, initial, device)
    different = differing_parameters(initial, trainer.model)
    with comparable(run.dtype, device), progress.task("overfits", options.steps, "steps") as task:
        curve, counts = _train(opened, batch, options.steps, task)
    end = collect_state(trainer, device.torch_device)["model"]
    if _leaves_weights(rank):
        write_trained(Path(request.folder) / TRAINED, 0 if rank is None else rank.number, end)
    unmoved = sorted(name for name in start if torch.equal(start[name], end[name]))
    report = OverfitCandidate(
        run=describe_run(device, run) | describe_trainer(request.trainer, plan, trainer.model),
        curve=curve,
        num_tokens=sorted(set(counts)),
        unmoved=unmoved,
        touched=sorted(start.keys() - set(unmoved)),
        weights_different=[name for name in different if name in start and _ADAPTER not in name],
    )
    trainer.teardown()
    return report


def measure_trained(request: MemorizationRequest, progress: Progress) -> Memorization:
    """Examine what the candidate left, on the trusted device in the yardstick's dtype."""
    device = open_run(parse_run(request.reference))
    choose_threads(estimate_size(request.options.model).num_parameters)
    with progress.step("measures what the candidate has memorized"):
        trainer = _open_trusted(request, _wide_dtype(request, device))
        missing = load_weights(trainer.model, read_trained(Path(request.trained)))
        if missing:
            return Memorization(missing=missing)
        batch = plan_sequences(request.options)
        with comparable(request.dtype, device):
            return measure_memorization(trainer.model, [trainer.on_device(one) for one in batch])


def plan_sequences(options: TrainOptions) -> Sequence[MicroBatch]:
    """The few sequences, which every step trains on."""
    return plan_batches(options.model_copy(update={"steps": 1}))[0]


def _wide_dtype(request: ReferenceRequest | MemorizationRequest, device: "Device") -> str:
    size = estimate_size(request.options.model)
    return yardstick_dtype(size.num_parameters, device.supported_dtypes())


def _open_trusted(request: ReferenceRequest | MemorizationRequest, wide: str | None) -> Trusted:
    """The trusted trainer, as yardstick in the dtype `wide` or as noise run."""
    trainer = trusted_trainer(request.options, request.dtype, wide)
    run = f"{parse_run(request.reference).device}/{wide or request.dtype}"
    trainer.setup(request.options.plan(run))
    keep_no_cache(trainer.model)
    return trainer


def _start(trainer: "Trainer", initial: State, device: "Device") -> dict[str, Tensor]:
    """The candidate's own weights with the reference's adapter, which is drawn at random."""
    own: dict[str, Tensor] = collect_state(trainer, device.torch_device)["model"]
    drawn = {name: initial["model"][name] for name in own if name in initial["model"]}
    adapter = {name: value for name, value in drawn.items() if _ADAPTER in name}
    if not adapter:
        restore_generators(initial["generators"], device.torch_device)
        return own
    start = {"model": own | adapter, "moments": {}, "generators": initial["generators"]}
    inject_state(trainer, start, device.torch_device)
    injected: dict[str, Tensor] = collect_state(trainer, device.torch_device)["model"]
    return injected


def _train(
    opened: OpenedTrainer, batch: Sequence[MicroBatch], steps: int, task: "Task"
) -> tuple[Curve, list[int]]:
    """The curve, and of each step the number of label tokens."""
    curve, counts = Curve(), []
    for _ in range(steps):
        with opened.errors_in("step"):
            done = opened.trainer.step(batch)
        curve.losses.append(float(done.loss))
        curve.grad_norms.append(float(done.grad_norm))
        counts.append(int(done.num_tokens))
        task.advance()
    return curve, counts


def _leaves_weights(rank: Rank | None) -> bool:
    """Whether no other rank leaves the same: those of dp and tp hold alike when gathered."""
    if rank is None:
        return True
    return not any(rank.mesh.get_local_rank(axis) for axis in rank.axes if axis != "pp")


def _share_changed(before: Tensor, after: Tensor) -> float:
    return float((before != after).double().mean()) if before.numel() else 0.0
