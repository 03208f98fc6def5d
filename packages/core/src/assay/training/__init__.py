"""Trains for a few steps, and judges each stage of each step. Importing it imports no torch."""

from importlib import import_module
from typing import TYPE_CHECKING

from assay.training.protocol import (
    MicroBatch,
    ObservableTrainer,
    StepReport,
    Trainer,
    TrainerTraits,
    TrainingPlan,
)

if TYPE_CHECKING:
    from assay.models.candidate_code import set_up
    from assay.training.batches import count_label_tokens, training_batches
    from assay.training.state.states import generator_states, restore_generators
    from assay.training.trainers.reference import ReferenceTrainer

_HOMES = {
    "ReferenceTrainer": "training.trainers.reference",
    "count_label_tokens": "training.batches",
    "generator_states": "training.state.states",
    "restore_generators": "training.state.states",
    "set_up": "models.candidate_code",
    "training_batches": "training.batches",
}

__all__ = [
    "MicroBatch",
    "ObservableTrainer",
    "ReferenceTrainer",
    "StepReport",
    "Trainer",
    "TrainerTraits",
    "TrainingPlan",
    "count_label_tokens",
    "generator_states",
    "restore_generators",
    "set_up",
    "training_batches",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"assay.{_HOMES[name]}"), name)
