"""Hashes the parts of parameters and moments that one rank holds."""

from torch import Tensor

from assay.training.protocol import Trainer
from assay.training.state.files import hash_value
from assay.training.state.parameters import named_parameters
from assay.training.state.records import HeldPart
from assay.training.state.sharding import coordinates_of, local_part


def hash_held_parts(trainer: Trainer) -> dict[HeldPart, str]:
    """Hash this rank's part of every parameter and of its optimizer moments."""
    held = {}
    for item in named_parameters(trainer.model):
        values = {None: item.tensor.detach(), **trainer.optimizer.state.get(item.tensor, {})}
        for moment, value in values.items():
            if isinstance(value, Tensor):
                part = HeldPart(item.name, moment, coordinates_of(value))
                held[part] = hash_value(local_part(value))
    return held
