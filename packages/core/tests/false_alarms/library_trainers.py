"""Trainers by the conventions of public libraries: correct, and none of them may fail.

Each class is given with `--candidate-trainer`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from assay.training.batches import check_batch
from assay.training.losses import IGNORED
from assay.training.protocol import MicroBatch, StepReport, TrainingPlan
from assay.training.trainers.parallel import DDPTrainer
from assay.training.trainers.reference import ReferenceTrainer


class AveragingDDP(DDPTrainer):
    """DistributedDataParallel averages over the ranks, so each loss is multiplied by their number.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    """

    def distribute(self, model: nn.Module) -> nn.Module:
        self._replica = DistributedDataParallel(model, process_group=self.data.group)
        return model

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        return super().compute_loss(micro_batch, num_step_tokens) * self.data.size

    def train_on(self, own: Sequence[MicroBatch], num_tokens: int) -> float:
        return super().train_on(own, num_tokens) / self.data.size


class Accelerated(ReferenceTrainer):
    """A loop on accelerate, which divides the loss by the number of micro-batches in backward.

    Source: https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation
    """

    reduce_gradients = None  # type: ignore[assignment]

    def setup(self, plan: TrainingPlan) -> None:
        super().setup(plan)
        self.accelerator = Accelerator(gradient_accumulation_steps=plan.micro_batches, cpu=True)
        self._network, self._stepping = self.accelerator.prepare(self.model, self.optimizer)

    @property
    def network(self) -> nn.Module:
        network: nn.Module = self._network
        return network

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        num_tokens = check_batch(batch)
        self.optimizer.zero_grad(set_to_none=True)
        total, norm = 0.0, 0.0
        for micro_batch in batch:
            with self.accelerator.accumulate(self._network):
                loss = self.compute_loss(self.on_device(micro_batch), num_tokens)
                self.backward(loss)
                total += float(loss) / len(batch)
                if self.accelerator.sync_gradients:
                    norm = self.clip_gradients(self.plan.max_grad_norm)
                    self.optimizer_step()
        self._num_steps += 1
        return StepReport(self._num_steps - 1, total, num_tokens, norm, self.plan.learning_rate)

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        accelerator = self.accelerator
        scale: int = accelerator.gradient_accumulation_steps * accelerator.num_processes
        return super().compute_loss(micro_batch, num_step_tokens) * scale

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def clip_gradients(self, max_norm: float) -> float:
        return float(self.accelerator.clip_grad_norm_(self._network.parameters(), max_norm))

    def optimizer_step(self) -> None:
        self._stepping.step()


class _Loop(Trainer):
    """The Hugging Face Trainer, whose phases are methods of `owner`."""

    owner: "HuggingFace"
    batch: Sequence[MicroBatch]

    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(list(self.batch), batch_size=None)  # type: ignore[arg-type]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        del model, return_outputs
        return self.owner.compute_loss(inputs, int(num_items_in_batch or 0))

    def loss_of_the_library(self, inputs: Mapping[str, Any], num_items: int) -> Tensor:
        model: Any = self.model
        loss: Any = super().compute_loss(
            model, dict(inputs), num_items_in_batch=torch.tensor(num_items)
        )
        return cast("Tensor", loss)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        del model
        return self.owner.clip_gradients(self.args.max_grad_norm)

    def clipped_by_the_library(self) -> float:
        clip: Any = super()._clip_grad_norm
        return float(clip(self.model))


class HuggingFace(ReferenceTrainer):
    """The Hugging Face Trainer: one `train()` of one optimizer step for each step.

    The model computes its own loss over the label tokens of all micro-batches.
    """

    reduce_gradients = None  # type: ignore[assignment]

    def setup(self, plan: TrainingPlan) -> None:
        super().setup(plan)
        arguments = TrainingArguments(
            output_dir="unused",
            max_steps=1,
            gradient_accumulation_steps=plan.micro_batches,
            learning_rate=plan.learning_rate,
            lr_scheduler_type="constant",
            max_grad_norm=plan.max_grad_norm,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            seed=plan.seed,
        )
        self.loop = _Loop(
            self.model, arguments, train_dataset=[0], optimizers=(self.optimizer, None)
        )
        self.loop.owner = self
        self._backward = self.loop.accelerator.backward
        self.loop.accelerator.backward = lambda loss, **_: self.backward(loss)
        self._step_of_torch = self.optimizer.step
        self.optimizer.step = lambda *_, **__: self.optimizer_step()  # type: ignore[method-assign, assignment]

    def step(self, batch: Sequence[MicroBatch]) -> StepReport:
        num_tokens = check_batch(batch)
        self._total, self._norm = 0.0, float("nan")
        self.optimizer.zero_grad(set_to_none=True)
        self.loop.batch = batch
        self.loop.train()
        self._num_steps += 1
        return StepReport(
            self._num_steps - 1, self._total, num_tokens, self._norm, self.plan.learning_rate
        )

    def compute_loss(self, micro_batch: MicroBatch, num_step_tokens: int) -> Tensor:
        loss = self.loop.loss_of_the_library(micro_batch, num_step_tokens)
        self._total += float(loss)
        return loss

    def backward(self, loss: Tensor) -> None:
        self._backward(loss)

    def clip_gradients(self, max_norm: float) -> float:
        del max_norm
        self._norm = self.loop.clipped_by_the_library()
        return self._norm

    def optimizer_step(self) -> None:
        self._step_of_torch()


class OverflowsAtFirst(ReferenceTrainer):
    """GradScaler, whose first scales overflow: these steps are skipped.

    Source: https://docs.pytorch.org/docs/stable/notes/amp_examples.html
    """

    # At 2**124 float32 overflows in backward, at 2**120 it does not.
    first_scale = 2.0**124


class Concatenated(ReferenceTrainer):
    """The micro-batches of a step are one batch, padded to the longest."""

    def arrange(self, own: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        return [concatenated(own)]


def concatenated(batch: Sequence[MicroBatch]) -> MicroBatch:
    """All rows of a step, padded on the right."""
    length = max(one["input_ids"].shape[1] for one in batch)
    padding = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED}
    return {
        name: torch.cat(
            [
                functional.pad(one[name], (0, length - one[name].shape[1]), value=value)
                for one in batch
            ]
        )
        for name, value in padding.items()
    }
