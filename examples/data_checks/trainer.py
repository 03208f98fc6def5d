# ruff: noqa: ANN401, ARG002 - the signatures of transformers
"""The Trainer of transformers as code for `assay smoke data`: its order of samples, and its accumulation.

assay smoke data --sampler examples/data_checks/trainer.py:TrainerRun --accumulation examples/data_checks/trainer.py:step
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import seed_worker

from assay_smoke.data.protocols import LoaderPlan, ResumePoint


class Callback(TrainerCallback):
    """Stops with a checkpoint after a number of steps, and copies gradients before the optimizer steps."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.gradients: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Copy the gradients."""
        for name, parameter in given["model"].named_parameters():
            grad = parameter.grad
            self.gradients[name] = torch.zeros_like(parameter) if grad is None else grad.clone()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop."""
        if state.global_step == self.stop_after:
            control.should_save = control.should_training_stop = True


def make_trainer(
    kind: type[Trainer], model: nn.Module, data: Any, callback: Callback, **arguments: Any
) -> Trainer:
    """Make a Trainer on the host that prints and saves nothing by itself. Put your own arguments here."""
    quiet = TrainingArguments(
        save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, **arguments
    )
    trainer = kind(model=model, args=quiet, train_dataset=data, callbacks=[callback])
    trainer.remove_callback(PrinterCallback)
    return trainer


class GivenBatches(Trainer):
    """Trains on micro-batches that are given as its dataset."""

    def get_train_dataloader(self) -> Any:
        """Return the micro-batches."""
        return self.train_dataset


def step(
    model: nn.Module,
    micro_batches: Sequence[Mapping[str, Tensor]],
    _num_step_tokens: int,
    num_ranks: int,
) -> None:
    """Accumulate by one step of Trainer, which counts the label tokens itself. Its learning rate is 0."""
    if num_ranks > 1:
        raise NotImplementedError("Trainer counts the tokens of ranks by collectives")
    callback = Callback()
    with tempfile.TemporaryDirectory() as folder:
        make_trainer(
            GivenBatches,
            model,
            [dict(micro_batch) for micro_batch in micro_batches],
            callback,
            output_dir=folder,
            max_steps=1,
            gradient_accumulation_steps=len(micro_batches),
            learning_rate=0.0,
            max_grad_norm=0.0,
        ).train()
    for name, parameter in model.named_parameters():
        parameter.grad = callback.gradients[name]


def loader(dataset: Any, num_workers: int, rank: int) -> DataLoader[Any]:
    """Open a DataLoader whose workers are seeded as in Trainer. For `--loader`."""
    seed = partial(seed_worker, num_workers=num_workers, rank=rank)
    return DataLoader(dataset, 2, num_workers=num_workers, worker_init_fn=seed, collate_fn=list)


class Recorder(nn.Module):
    """A model with one parameter that records the numbers of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []

    def forward(self, number: Tensor) -> Mapping[str, Tensor]:
        """Record the batch."""
        self.seen.append(number.tolist())
        return {"loss": self.weight * number.float().mean()}


class TrainerRun:
    """A training run by Trainer, as an iterable of epochs. Its state is the number of steps."""

    def __init__(self, plan: LoaderPlan, resumed: ResumePoint | None) -> None:
        if plan.num_ranks > 1 or plan.num_workers:
            raise NotImplementedError("one process")
        self.plan, self.resumed = plan, resumed
        self.num_drawn = 0

    def state_dict(self) -> int:
        """Return the number of drawn batches. A resumed run writes a checkpoint after as many steps."""
        return self.num_drawn

    def __iter__(self) -> Iterator[Iterator[list[int]]]:
        plan, resumed = self.plan, self.resumed
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if resumed is not None:
                self.train(folder, resumed.state)
                checkpoint = f"{folder}/checkpoint-{resumed.state}"
            seen = self.train(folder, None, checkpoint)
        full, rest = divmod(plan.num_samples, plan.batch_size)
        per_epoch = full + (rest > 0 and not plan.drop_last)
        first, before = (resumed.epoch, resumed.num_batches) if resumed else (0, 0)
        for epoch in range(first, plan.num_epochs):
            count = per_epoch - (before if epoch == first else 0)
            yield self.draw(seen[:count])
            seen = seen[count:]

    def draw(self, batches: Sequence[list[int]]) -> Iterator[list[int]]:
        """Yield the batches, and count them."""
        for batch in batches:
            self.num_drawn += 1
            yield batch

    def train(self, folder: str, stop_after: Any, checkpoint: str | None = None) -> list[list[int]]:
        """Return the batches that the model gets."""
        plan, model = self.plan, Recorder()
        if not plan.shuffle:
            raise NotImplementedError("Trainer shuffles")
        make_trainer(
            Trainer,
            model,
            [{"number": number} for number in range(plan.num_samples)],
            Callback(stop_after),
            output_dir=folder,
            num_train_epochs=plan.num_epochs,
            per_device_train_batch_size=plan.batch_size,
            dataloader_drop_last=plan.drop_last,
            seed=plan.seed,
            remove_unused_columns=False,
        ).train(resume_from_checkpoint=checkpoint)
        return model.seen
