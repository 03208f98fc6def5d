"""A run of which nothing is replaced: its losses, its checkpoint, and its resumption from that."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.errors import AssayError
from assay.models import load_model
from assay.sites import unwrapped_path
from assay.training.adapters import adapter_tensors, read_adapter
from assay.training.batches import MicroBatch
from assay.training.opening import blaming
from assay.training.reference import MODEL_FOLDER
from assay.training.requests import CandidateRequest, FreeRun, StepRecord
from assay.training.state_files import fingerprint
from assay.training.states import State, feed_state, plain_name

_NAMES_SHOWN = 50


def run_freely(
    trainer: Any,  # noqa: ANN401 - any trainer
    open_another: Callable[[], Any],
    batches: Sequence[Sequence[MicroBatch]],
    start: State,
    request: CandidateRequest,
    torch_device: str,
) -> FreeRun:
    """Train with a checkpoint in the middle, then once more from the checkpoint."""
    options = request.options
    folder = Path(request.folder).parent / "checkpoint"
    run = FreeRun()
    feed_state(trainer, start, torch_device)
    run.steps = _train(trainer, request, batches[: options.resume_at])
    expected: dict[str, str] = {}
    try:
        trainer.save(folder)
        expected = fingerprint(trainer.state_dict())
        _read_back(trainer, folder / MODEL_FOLDER, request, run)
    except (AssayError, OSError, ValueError) as error:
        run.problem = f"the checkpoint cannot be written: {error}"
    run.steps += _train(trainer, request, batches[options.resume_at :])
    trainer.teardown()
    if run.problem is not None:
        return run
    resumed = open_another()
    # A process that resumes has drawn other numbers before; its seed alone would hide it.
    torch.manual_seed(request.options.seed + 1)
    random.seed(request.options.seed + 1)
    try:
        resumed.load(folder)
    except (AssayError, OSError, ValueError, KeyError, RuntimeError) as error:
        run.problem = f"the checkpoint cannot be read: {type(error).__name__}: {error}"
        return run
    actual = fingerprint(resumed.state_dict())
    paths = expected.keys() | actual.keys()
    wrong = sorted(path for path in paths if expected.get(path) != actual.get(path))
    run.not_restored, run.compared = wrong[:_NAMES_SHOWN], len(expected)
    run.resumed = _train(resumed, request, batches[options.resume_at :])
    resumed.teardown()
    return run


def _train(
    trainer: Any,  # noqa: ANN401 - any trainer
    request: CandidateRequest,
    batches: Sequence[Sequence[MicroBatch]],
) -> list[StepRecord]:
    records = []
    for batch in batches:
        with blaming(request.trainer or "reference", "step"):
            done = trainer.step(batch)
        records.append(
            StepRecord(
                step=done.step, loss=done.loss, num_tokens=done.num_tokens, grad_norm=done.grad_norm
            )
        )
    return records


def _read_back(trainer: Any, folder: Path, request: CandidateRequest, run: FreeRun) -> None:  # noqa: ANN401
    """Compare what users would load with what the model holds, bit for bit."""
    if not folder.is_dir():
        run.notes.append(
            f"the checkpoint has no folder {MODEL_FOLDER}: what users would load is not compared"
        )
        return
    if request.options.lora:
        expected, actual = adapter_tensors(trainer.model), read_adapter(folder)
    else:
        expected = trainer.model.state_dict()
        dtype = str(next(trainer.model.parameters()).dtype).removeprefix("torch.")
        loaded = load_model(str(folder), dtype=dtype, remote_code=request.options.remote_code)
        actual = loaded.model.state_dict()
    run.saved_compared = len(expected)
    run.saved = _wrong(expected, actual)[:_NAMES_SHOWN]


def _wrong(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> list[str]:
    hashes = [
        fingerprint({plain_name(name): value for name, value in side.items()})
        for side in (expected, actual)
    ]
    return sorted(
        unwrapped_path(path)
        for path in hashes[0].keys() | hashes[1].keys()
        if hashes[0].get(path) != hashes[1].get(path)
    )
