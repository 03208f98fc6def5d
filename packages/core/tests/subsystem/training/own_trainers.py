"""Trainers that save the host's torch generator alone; two of them are right."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from assay.training import MicroBatch, ReferenceTrainer, StepReport


class SavesTorchGenerator(ReferenceTrainer):
    """Nothing else is drawn from: dropout draws from torch."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"generators": {"torch": torch.get_rng_state()}}

    def load_generators(self, states: Mapping[str, Any]) -> None:
        torch.set_rng_state(states["torch"])


class DrawsFromPython(SavesTorchGenerator):
    """A step draws from a generator that no state holds."""

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        random.random()  # noqa: S311
        return super().step(batch)


class SeedsPythonInEveryStep(DrawsFromPython):
    """The step number decides what is drawn."""

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        random.seed(self._num_steps)
        return super().step(batch)
