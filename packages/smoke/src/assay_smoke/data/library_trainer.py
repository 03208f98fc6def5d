"""Transformers' Trainer in one process: its gradient accumulation, and its sample order after a resume."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from assay.models.transformers_logging import quiet_transformers
from assay.watchdog import temporary_folder
from assay_smoke.data.protocols import LoaderPlan, ResumePoint

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

# Trainer runs in one process here, so plans have one rank.
TRAINER_PLANS = (LoaderPlan(num_samples=13, batch_size=6, num_epochs=2),)


def trainer_step(
    model: nn.Module,
    micro_batches: Sequence[Mapping[str, Tensor]],
    _num_step_tokens: int,
    _num_ranks: int,
) -> None:
    """Accumulate by one step of Trainer, which counts the label tokens itself.

    The gradients are those that reach the optimizer. Its learning rate of 0 changes nothing.
    """
    from transformers import Trainer, TrainerCallback

    gradients: dict[str, Tensor] = {}

    class KeepGradients(TrainerCallback):
        """Copies gradients just before the optimizer steps."""

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401, ARG002
            for name, parameter in model.named_parameters():
                grad = parameter.grad
                gradients[name] = torch.zeros_like(parameter) if grad is None else grad.clone()

    class GivenBatches(Trainer):
        """Trains on given micro-batches."""

        def get_train_dataloader(self) -> Any:  # noqa: ANN401
            return [dict(micro_batch) for micro_batch in micro_batches]

    with temporary_folder("assay-trainer-") as folder, quiet_transformers():
        _make_trainer(
            GivenBatches,
            model,
            [{}],
            KeepGradients(),
            output_dir=str(folder),
            max_steps=1,
            gradient_accumulation_steps=len(micro_batches),
            learning_rate=0.0,
            max_grad_norm=0.0,
        ).train()
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]


class TrainerRun:
    """A training run by Trainer, as an iterable of epochs. Its state is a checkpoint."""

    def __init__(self, plan: LoaderPlan, resumed: ResumePoint | None) -> None:
        self._plan = plan
        self._resumed = resumed
        self._num_drawn = 0

    def __iter__(self) -> Iterator[Iterator[list[int]]]:
        plan, resumed = self._plan, self._resumed
        seen = _train(plan, resumed.state if resumed else None)
        full, rest = divmod(plan.num_samples, plan.batch_size)
        per_epoch = full + (rest > 0 and not plan.drop_last)
        first, before = (resumed.epoch, resumed.num_batches) if resumed else (0, 0)
        for epoch in range(first, plan.num_epochs):
            count = per_epoch - (before if epoch == first else 0)
            yield self._draw(seen[:count])
            seen = seen[count:]

    def _draw(self, batches: Sequence[list[int]]) -> Iterator[list[int]]:
        for batch in batches:
            self._num_drawn += 1
            yield batch

    def state_dict(self) -> int:
        """Return the number of drawn batches. A resumed run writes a checkpoint after as many steps."""
        return self._num_drawn


def _train(plan: LoaderPlan, num_steps: object) -> list[list[int]]:
    """Return the batches that the model got, after a resume from `num_steps` if it is a number."""
    with temporary_folder("assay-trainer-") as folder, quiet_transformers():
        if not isinstance(num_steps, int):
            return _run_trainer(plan, folder, None, None)
        _run_trainer(plan, folder, num_steps, None)
        return _run_trainer(plan, folder, None, folder / f"checkpoint-{num_steps}")


def _run_trainer(
    plan: LoaderPlan, folder: Path, stop_after: int | None, resume_from: Path | None
) -> list[list[int]]:
    from transformers import Trainer, TrainerCallback

    class StopAndSave(TrainerCallback):
        """Stops the run with a checkpoint after a number of steps."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401, ARG002
            if state.global_step == stop_after:
                control.should_save = control.should_training_stop = True

    model = _Recorder()
    _make_trainer(
        Trainer,
        model,
        [{"number": number} for number in range(plan.num_samples)],
        StopAndSave(),
        output_dir=str(folder),
        num_train_epochs=plan.num_epochs,
        per_device_train_batch_size=plan.batch_size,
        dataloader_num_workers=plan.num_workers,
        dataloader_drop_last=plan.drop_last,
        seed=plan.seed,
        remove_unused_columns=False,
    ).train(resume_from_checkpoint=str(resume_from) if resume_from else None)
    return model.seen


def _make_trainer(
    kind: "type[Trainer]",
    model: nn.Module,
    samples: Sequence[Mapping[str, int]],
    callback: "TrainerCallback",
    **arguments: Any,  # noqa: ANN401 - of TrainingArguments
) -> "Trainer":
    """Make a Trainer on the host that prints and saves nothing by itself."""
    from transformers import TrainingArguments
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    quiet = TrainingArguments(
        save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, **arguments
    )
    data: Any = samples
    trainer: Trainer = kind(model=model, args=quiet, train_dataset=data, callbacks=[callback])
    for printing in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(printing)
    return trainer


class _Recorder(nn.Module):
    """A model with one parameter that records the numbers of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []

    def forward(self, number: Tensor) -> Mapping[str, Tensor]:
        self.seen.append(number.tolist())
        return {"loss": self.weight * number.float().mean()}
