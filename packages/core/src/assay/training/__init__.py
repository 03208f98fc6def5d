"""Training for a few steps, so that each of them can be judged. Importing it imports no torch."""

from importlib import import_module
from typing import TYPE_CHECKING

from assay.training.protocol import StepReport, Trainer, TrainingPlan

if TYPE_CHECKING:
    from assay.training.batches import MicroBatch, training_batches
    from assay.training.trainers.reference import ReferenceTrainer

_HOMES = {
    "MicroBatch": "batches",
    "ReferenceTrainer": "trainers.reference",
    "training_batches": "batches",
}

__all__ = [
    "MicroBatch",
    "ReferenceTrainer",
    "StepReport",
    "Trainer",
    "TrainingPlan",
    "training_batches",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
