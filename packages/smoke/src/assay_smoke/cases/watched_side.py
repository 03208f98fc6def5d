"""A candidate whose trainers record their phases and their final values."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from assay.launch import Rank
from assay.training.processes.candidate_side import CandidateSide
from assay.training.state.files import fingerprint
from assay.training.state.parameter_records import hash_held_parts
from assay.training.state.parameters import named_parameters
from assay.training.state.sharding import local_part
from assay.training.state.states import current_state
from assay.training.trainers.registry import OpenedTrainer
from assay_smoke.cases.requests import CaseRequest, Hashes, Survivors
from assay_smoke.cases.timeline import CyclePhase, Timeline
from assay_smoke.trainers.deepspeed.partitions import whole_size

_METHODS: dict[str, CyclePhase] = {
    "step": "step",
    "save": "checkpoint",
    "load": "resume",
    "teardown": "tear-down",
}
_SHOWN = 3


class WatchedSide(CandidateSide):
    """Opens trainers that record each call as a phase.

    ended: hashes of each trainer's model at its teardown, in order.
    """

    def __init__(self, request: CaseRequest, rank: Rank) -> None:
        super().__init__(request.candidate, rank)
        self.timeline = Timeline(Path(request.timelines) / f"rank-{rank.number}.jsonl", self.device)
        self.resume_at = request.candidate.options.resume_at
        self.ended: list[Hashes] = []

    def open(self) -> OpenedTrainer:
        """Open and set up a trainer."""
        with self.timeline.phase("set-up"):
            opened = super().open()
        num_steps = 0
        for method, phase in _METHODS.items():
            original = getattr(opened.trainer, method)

            def call(
                *args: Any,  # noqa: ANN401 - of any trainer
                original: Callable[..., Any] = original,
                phase: CyclePhase = phase,
            ) -> Any:  # noqa: ANN401
                nonlocal num_steps
                if phase == "tear-down":
                    self.ended.append(hash_model(opened, self.device.torch_device))
                number = num_steps if phase == "step" else None
                with self.timeline.phase(phase, number):
                    result = original(*args)
                if phase == "step":
                    num_steps = getattr(result, "step", num_steps) + 1
                elif phase == "resume":
                    num_steps = self.resume_at
                return result

            setattr(opened.trainer, method, call)
        return opened


def hash_model(opened: OpenedTrainer, torch_device: str) -> Hashes:
    """Hash every whole parameter and buffer. A collective."""
    return fingerprint({"model": current_state(opened.trainer, torch_device)["model"]})


def hash_held(opened: OpenedTrainer) -> Hashes:
    """Hash every part of a parameter or moment that this rank holds."""
    return {str(part): digest for part, digest in hash_held_parts(opened.trainer).items()}


def held_parameter_bytes(opened: OpenedTrainer, num_ranks: int) -> int:
    """Return the size of this rank's parameters or shards.

    A parameter that is whole only during its use, as under ZeRO-3, counts as an even share.
    """
    total = 0
    for item in named_parameters(opened.trainer.model):
        held = local_part(item.tensor).numel() or whole_size(item.tensor) // num_ranks
        total += held * item.tensor.element_size()
    return total


def live_tensors() -> dict[int, Tensor]:
    """Return every tensor that Python's garbage collector knows, by identity."""
    gc.collect()
    # type() instead of isinstance(): `__class__` of an arbitrary object may run code.
    return {id(item): item for item in gc.get_objects() if issubclass(type(item), Tensor)}


def survivors(before: dict[int, Tensor]) -> Survivors:
    """Return live tensors that are not in `before`, one per storage."""
    new = [tensor for key, tensor in live_tensors().items() if key not in before]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor for tensor in new if _has_storage(tensor)
    }
    sizes = sorted(storages.values(), key=lambda tensor: -tensor.untyped_storage().nbytes())
    return Survivors(
        num_bytes=sum(tensor.untyped_storage().nbytes() for tensor in sizes),
        shapes=[f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in sizes[:_SHOWN]],
    )


def _has_storage(tensor: Tensor) -> bool:
    if isinstance(tensor, DTensor):  # the garbage collector also knows the local tensor
        return False
    # Fake tensors of compilers name a real device, and their storage is on `meta`.
    return tensor.layout is torch.strided and tensor.untyped_storage().device.type != "meta"
