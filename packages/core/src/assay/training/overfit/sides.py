"""Both sides of `assay check train --overfit`, each in its own process. They train and do not judge.

Shapes: B rows, T positions, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from assay.devices.registry import describe_run, open_run
from assay.devices.run_string import parse_run
from assay.errors import UsageError
from assay.hooks.coverage_watch import UsageWatch
from assay.hooks.module_tracer import ModuleTracer, NullHandler
from assay.judge.coverage import Usage
from assay.launch import Rank
from assay.models import count_parameters
from assay.models.load import choose_threads
from assay.progress import Progress
from assay.training.batches import check_batch
from assay.training.losses import IGNORED
from assay.training.model_batches import TrainingData
from assay.training.processes.candidate import CandidateSide
from assay.training.processes.reference import TrustedSide, wide_dtype
from assay.training.protocol import MicroBatch, StepReport, Trainer
from assay.training.replay.determinism import comparable, keep_no_cache
from assay.training.reports import (
    TRAINED,
    LossCurve,
    Memorization,
    OverfitCandidate,
    OverfitReference,
    TrainCheck,
)
from assay.training.state.files import read_golden_state, read_state, write_state
from assay.training.state.states import (
    State,
    collect_state,
    differing_parameters,
    inject_state,
    plain_name,
    restore_generators,
)
from assay.training.trainers.registry import describe_trainer

_FILE = "trained"

Targets = Callable[[MicroBatch], Tensor]


def _prompts(micro_batch: MicroBatch) -> Tensor:
    """Return the next token where it is text with a masked label."""
    is_prompt = (micro_batch["labels"] == IGNORED) & (micro_batch["attention_mask"] == 1)
    return _shifted(torch.where(is_prompt, micro_batch["input_ids"], IGNORED), 1)


def _padding(micro_batch: MicroBatch) -> Tensor:
    """Return the next token where it is padding."""
    is_padding = micro_batch["attention_mask"] == 0
    return _shifted(torch.where(is_padding, micro_batch["input_ids"], IGNORED), 1)


def _shifted(targets_BT: Tensor, places: int) -> Tensor:
    return functional.pad(targets_BT[:, places:], (0, places), value=IGNORED)


# The kind to be memorized, and kinds that faulty trainers memorize.
LABELS = "labels"
KINDS: Mapping[str, Targets] = {
    LABELS: lambda micro_batch: _shifted(micro_batch["labels"], 1),
    "prompt": _prompts,
    "padding": _padding,
    "labels not shifted": lambda micro_batch: micro_batch["labels"],
    "labels shifted twice": lambda micro_batch: _shifted(micro_batch["labels"], 2),
}


def measure_memorization(model: nn.Module, batch: Sequence[MicroBatch]) -> Memorization:
    """Return the mean loss of `model` per token of each kind, in nats, without dropout."""
    sums, counts = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for micro_batch in batch:
            logits_BTV: Any = model(
                input_ids=micro_batch["input_ids"], attention_mask=micro_batch["attention_mask"]
            ).logits
            for kind, targets_of in KINDS.items():
                targets_BT = targets_of(micro_batch)
                counts[kind] += int((targets_BT != IGNORED).sum())
                sums[kind] += float(
                    functional.cross_entropy(
                        logits_BTV.double().flatten(0, 1),
                        targets_BT.flatten(),
                        ignore_index=IGNORED,
                        reduction="sum",
                    )
                )
    model.train(was_training)
    return Memorization(nats={kind: sums[kind] / counts[kind] for kind in KINDS if counts[kind]})


def write_trained(folder: Path, number: int, weights: Mapping[str, Tensor]) -> None:
    """Write the whole weights of rank `number`, by their names in the unwrapped model."""
    folder.mkdir(parents=True, exist_ok=True)
    write_state(folder / f"{_FILE}-{number}", {"model": dict(weights)})


def read_trained(folder: Path) -> dict[str, Tensor]:
    """Read the weights of all ranks."""
    weights: dict[str, Tensor] = {}
    for path in sorted(folder.glob(f"{_FILE}-*.json")):
        weights |= read_state(path.with_suffix(""))["model"]
    return weights


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> list[str]:
    """Copy `weights` into `model`, and return the names that are missing or have another shape."""
    missing = []
    with torch.no_grad():
        for name, value in model.state_dict().items():
            given = weights.get(plain_name(name))
            if given is None or given.shape != value.shape:
                missing.append(plain_name(name))
            else:
                value.copy_(given)
    return missing


_ADAPTER = ".lora_"


def overfit_trusted(request: TrainCheck, progress: Progress) -> OverfitReference:
    """Overfit as yardstick and as noise run, and write the initial state into `request.folder`."""
    device = open_run(parse_run(request.reference))
    options = request.options
    wide = wide_dtype(options.model, device)
    choose_threads(count_parameters(options.model))
    progress.number_phases(5)
    with progress.step(f"loading {options.model} in {wide}"):
        # Every step has the batch of one.
        single = replace(request, options=options.model_copy(update={"steps": 1}))
        side = TrustedSide(single, device, wide)
        _, data = side.plan_data()
        if not data.is_text:
            raise UsageError(
                f"--overfit is for decoders of text, not for the {data.loss} loss of a {type(side.trainer.model).__name__}"
            )
    (batch,) = data.batches
    yardstick, model = side.trainer, side.trainer.model
    facts, initial = side.begin()
    drawn = torch.get_rng_state()
    with progress.task("overfitting", options.steps, "steps"):
        curve = LossCurve.of(side.train_freely([batch] * options.steps, initial))
    draws = not torch.equal(drawn, torch.get_rng_state())
    watch = UsageWatch(NullHandler())
    watch.add_parameters_of(model)
    with (
        progress.step("measuring what it has memorized"),
        ModuleTracer(watch).attached(model),
        watch.reading(),
    ):
        memorization = measure_memorization(
            model, [yardstick.on_device(micro_batch) for micro_batch in batch]
        )
    yardstick.teardown()
    with progress.step(f"noise run: loading {options.model} in {request.dtype}"):
        noise = TrustedSide(request, device, None)
    inject_state(noise.trainer, initial, device.torch_device)
    before = collect_state(noise.trainer, device.torch_device)["model"]
    with progress.task("noise run: overfitting", options.steps, "steps"):
        noise_curve = LossCurve.of(noise.train_freely([batch] * options.steps, initial))
    after = collect_state(noise.trainer, device.torch_device)["model"]
    shares = {name: _share_changed(before[name], after[name]) for name in before}
    return OverfitReference(
        model=facts,
        reference=describe_run(device, parse_run(request.reference)) | {"yardstick": wide},
        yardstick=curve,
        noise=noise_curve,
        memorization=memorization,
        num_tokens=check_batch(batch),
        trainable=initial["trainable"],
        # In another run, rounding leaves other elements of a small update.
        moved=sorted(name for name, share in shares.items() if 2 * share > 1),
        touched=sorted(name for name, share in shares.items() if share > 0),
        draws=draws,
        usage=Usage.model_validate(watch.to_json()),
    )


def overfit_candidate(
    request: TrainCheck, progress: Progress, rank: Rank | None = None
) -> OverfitCandidate:
    """Overfit with the candidate's trainer, or one rank of it, and write its weights."""
    side, options = CandidateSide(request, rank), request.options
    device, run = side.device, side.run
    (batch,) = side.data.batches
    progress.number_phases(2)
    with progress.step(f"loading {options.model} on {run}"):
        opened = side.open()
    trainer = opened.trainer
    keep_no_cache(trainer.model)
    initial = read_golden_state(side.golden, 0)
    start = _start(trainer, initial, device.torch_device)
    different = differing_parameters(initial, trainer.model)
    steps: list[StepReport] = []
    with (
        comparable(run.dtype, device),
        progress.task("overfitting", options.steps, "steps") as task,
    ):
        for _ in range(options.steps):
            with opened.errors_in("step"):
                steps.append(trainer.step(batch))
            task.advance()
    end = collect_state(trainer, device.torch_device)["model"]
    # Ranks that differ in dp or tp alone gather the same weights: the first of them writes.
    if rank is None or not any(rank.mesh.get_local_rank(one) for one in rank.axes if one != "pp"):
        write_trained(request.folder / TRAINED, 0 if rank is None else rank.number, end)
    unmoved = sorted(name for name in start if torch.equal(start[name], end[name]))
    described = describe_trainer(request.trainer, side.plan, trainer.model)
    report = OverfitCandidate(
        run=describe_run(device, run) | described,
        curve=LossCurve.of(steps),
        num_tokens=sorted({int(step.num_tokens) for step in steps}),
        unmoved=unmoved,
        touched=sorted(start.keys() - set(unmoved)),
        weights_different=[name for name in different if name in start and _ADAPTER not in name],
    )
    trainer.teardown()
    return report


def measure_trained(request: TrainCheck, progress: Progress) -> Memorization:
    """Measure the candidate's weights on the trusted device, in the yardstick's dtype.

    request: its folder holds the weights of all ranks.
    """
    device = open_run(parse_run(request.reference))
    choose_threads(count_parameters(request.options.model))
    with progress.step("measuring what the candidate has memorized"):
        trainer = TrustedSide(request, device, wide_dtype(request.options.model, device)).trainer
        missing = load_weights(trainer.model, read_trained(request.folder))
        if missing:
            return Memorization(missing=missing)
        (batch,) = TrainingData.read(request.golden).batches
        with comparable(request.dtype, device):
            return measure_memorization(trainer.model, [trainer.on_device(one) for one in batch])


def _start(trainer: Trainer, initial: State, torch_device: str) -> dict[str, Tensor]:
    """Return the candidate's own weights, with the reference's random adapter."""
    own: dict[str, Tensor] = collect_state(trainer, torch_device)["model"]
    drawn = {name: initial["model"][name] for name in own if name in initial["model"]}
    adapter = {name: value for name, value in drawn.items() if _ADAPTER in name}
    if not adapter:
        restore_generators(initial["generators"], torch_device)
        return own
    start = {"model": own | adapter, "moments": {}, "generators": initial["generators"]}
    inject_state(trainer, start, torch_device)
    injected: dict[str, Tensor] = collect_state(trainer, torch_device)["model"]
    return injected


def _share_changed(before: Tensor, after: Tensor) -> float:
    return float((before != after).double().mean()) if before.numel() else 0.0
