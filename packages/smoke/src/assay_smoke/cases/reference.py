"""The reference side of a case: yardstick and noise run."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from assay.devices.base import Device
from assay.devices.registry import describe_run, open_run
from assay.devices.run_string import parse_run
from assay.launch import Rank
from assay.models import count_parameters
from assay.models.size import choose_threads, yardstick_dtype
from assay.training.batches import MicroBatch
from assay.training.processes.golden import Batches, plan_batches
from assay.training.processes.requests import ReferenceReport, TrainCheck
from assay.training.processes.trusted import TrustedSide
from assay.training.replay.conditions import comparable
from assay.training.replay.run_rows import count_rows
from assay.training.state.files import state_file, write_state
from assay.training.state.parameter_records import trajectory_of
from assay.training.state.states import collect_state, shared_parameters
from assay_smoke.cases.requests import ReferenceAnswer

_LOGITS = "logits.safetensors"


def train_reference(_: Rank, request: TrainCheck) -> ReferenceAnswer:
    """Train the yardstick and the noise run. Write their initial and final states to `request.folder`."""
    folder, options = request.folder, request.options
    run = parse_run(request.reference)
    device = open_run(run)
    batches = plan_batches(options)
    num_parameters = count_parameters(options.model)
    choose_threads(num_parameters)
    wide = yardstick_dtype(num_parameters, device.supported_dtypes())
    yardstick = TrustedSide(request, device, wide)
    model = yardstick.trainer.model
    facts, initial = yardstick.begin()
    drawn = torch.get_rng_state()
    recorded, end = yardstick.train_rounded(batches, initial)
    draws = not torch.equal(drawn, torch.get_rng_state())
    write_state(state_file(folder, len(batches)), end)
    logits = logits_of(model, batches, device)
    save_file({"logits": logits}, folder / _LOGITS)

    noise = TrustedSide(request, device, None)
    free = noise.train_freely(batches, initial)
    ended = collect_state(noise.trainer, device.torch_device)["model"]
    shares = {name: _share_changed(initial["model"][name], ended[name]) for name in ended}
    report = ReferenceReport(
        model=facts,
        reference=describe_run(device, run) | {"yardstick": wide},
        yardstick_losses=[step.loss for step in recorded],
        noise_losses=[step.loss for step in free],
        noise_trajectory=trajectory_of(noise.trainer.model, end),
        num_tokens=[step.num_tokens for step in recorded],
        num_rows=count_rows(batches),
        num_trainable=facts["num_trainable"],
        shared=shared_parameters(noise.trainer.model),
        draws=draws,
    )
    error = relative_error(logits_of(noise.trainer.model, batches, device), logits)
    return ReferenceAnswer(
        training=report,
        logits_noise=error,
        moved=sorted(name for name, share in shares.items() if 2 * share > 1),
    )


def read_logits(golden: Path) -> Tensor:
    """Read the yardstick's final logits, (N, V)."""
    return load_file(golden / _LOGITS)["logits"]


def logits_of(model: nn.Module, batches: Batches, device: Device) -> Tensor:
    """Compute logits on the micro-batches of the first step, without dropout.

    Returns: float32 on the host, (N, V), at the N positions without padding.
    """
    was_training, dtype = model.training, next(model.parameters()).dtype
    model.eval()
    conditions = comparable(str(dtype).removeprefix("torch."), device)
    with torch.no_grad(), device.execution(), conditions:
        rows = [_logits_of_batch(model, batch, device.torch_device) for batch in batches[0]]
    model.train(was_training)
    return torch.cat(rows)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of `expected`."""
    a, e = actual.double(), expected.double()
    return float((a - e).norm() / e.norm())


def _share_changed(before: Tensor, after: Tensor) -> float:
    return float((before.double() != after.double()).double().mean())


def _logits_of_batch(model: nn.Module, batch: MicroBatch, torch_device: str) -> Tensor:
    mask = batch["attention_mask"].to(torch_device)
    logits = model(input_ids=batch["input_ids"].to(torch_device), attention_mask=mask).logits
    kept: Tensor = logits[mask.bool()]
    return kept.double().cpu().float() if kept.dtype == torch.float64 else kept.float().cpu()
