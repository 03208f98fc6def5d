"""The sample order of transformers' Trainer, also after a resume.

Trainer runs in one process here, so plans have one rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from assay.models.transformers_logging import quiet_transformers
from assay.watchdog import temporary_folder
from assay_smoke.data.protocols import LoaderPlan, ResumePoint

if TYPE_CHECKING:
    from transformers import Trainer

TRAINER_PLANS = (LoaderPlan(num_samples=13, batch_size=6, num_epochs=2),)


class TrainerRun:
    """A training run by Trainer, as an iterable of epochs. Its state is a checkpoint."""

    def __init__(self, plan: LoaderPlan, resumed: ResumePoint | None) -> None:
        self._plan = plan
        self._resumed = resumed
        self._num_drawn = 0

    def __iter__(self) -> Iterator[Iterator[list[int]]]:
        checkpoint = _Checkpoint.of(self._resumed)
        seen = _train(self._plan, checkpoint)
        per_epoch = -(-self._plan.num_samples // self._plan.batch_size)
        if self._plan.drop_last:
            per_epoch = self._plan.num_samples // self._plan.batch_size
        first = self._resumed.epoch if self._resumed else 0
        before = self._resumed.num_batches if self._resumed else 0
        for epoch in range(first, self._plan.num_epochs):
            count = per_epoch - (before if epoch == first else 0)
            yield self._draw(seen[:count])
            seen = seen[count:]

    def _draw(self, batches: Sequence[list[int]]) -> Iterator[list[int]]:
        for batch in batches:
            self._num_drawn += 1
            yield batch

    def state_dict(self) -> "_Checkpoint":
        """Return a checkpoint after as many steps as batches were drawn."""
        return _Checkpoint(self._plan, self._num_drawn)


class _Checkpoint:
    """A checkpoint that a run writes on demand by stopping there."""

    def __init__(self, plan: LoaderPlan, num_steps: int) -> None:
        self.plan = plan
        self.num_steps = num_steps

    @staticmethod
    def of(resumed: ResumePoint | None) -> "_Checkpoint | None":
        state = resumed.state if resumed else None
        return state if isinstance(state, _Checkpoint) else None


def _train(plan: LoaderPlan, checkpoint: _Checkpoint | None) -> list[list[int]]:
    """Return the batches that the model got, from `checkpoint` on."""
    with temporary_folder("assay-trainer-") as folder, quiet_transformers():
        if checkpoint is None:
            return _run_trainer(plan, folder, None, None)
        _run_trainer(plan, folder, checkpoint.num_steps, None)
        return _run_trainer(plan, folder, None, folder / f"checkpoint-{checkpoint.num_steps}")


def _run_trainer(
    plan: LoaderPlan, folder: Path, stop_after: int | None, resume_from: Path | None
) -> list[list[int]]:
    model = _Recorder()
    trainer = _make_trainer(plan, folder, model, stop_after)
    trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
    return model.seen


def _make_trainer(
    plan: LoaderPlan, folder: Path, model: "_Recorder", stop_after: int | None
) -> "Trainer":
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    class StopAndSave(TrainerCallback):
        """Stops the run with a checkpoint after a number of steps."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401, ARG002
            if state.global_step == stop_after:
                control.should_save = control.should_training_stop = True

    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=plan.num_epochs,
        per_device_train_batch_size=plan.batch_size,
        dataloader_num_workers=plan.num_workers,
        dataloader_drop_last=plan.drop_last,
        seed=plan.seed,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    samples = [{"number": number} for number in range(plan.num_samples)]
    trainer: Trainer = Trainer(
        model=model, args=arguments, train_dataset=samples, callbacks=[StopAndSave()]
    )
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
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
