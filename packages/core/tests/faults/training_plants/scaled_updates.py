"""Trainers whose updates have the wrong size, by a tenth or in one step alone."""

import torch

from assay.training.trainers.reference import ReferenceTrainer


class UpdatesTooSmall(ReferenceTrainer):
    """Each update is a tenth too small."""

    def optimizer_step(self) -> None:
        before = [one.detach().clone() for one in self._trained()]
        super().optimizer_step()
        if not self._is_scaled:
            return
        with torch.no_grad():
            for one, old in zip(self._trained(), before, strict=True):
                # In float32, so that the change is rounded once.
                one.copy_(old.float() + 0.9 * (one.float() - old.float()))

    @property
    def _is_scaled(self) -> bool:
        return True


class FirstUpdateTooSmall(UpdatesTooSmall):
    """The update of the first step is a tenth too small."""

    @property
    def _is_scaled(self) -> bool:
        return self._num_steps == 0


class LearningRateTooLarge(ReferenceTrainer):
    """The learning rate is a tenth larger than the plan's."""

    def optimizer_step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 1.1 * self.plan.learning_rate
        super().optimizer_step()


class LastUpdateTooLarge(ReferenceTrainer):
    """The schedule ends with a learning rate that is a fifth too large."""

    def optimizer_step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.learning_rate * (1.2 if self._num_steps == 2 else 1)
        super().optimizer_step()
