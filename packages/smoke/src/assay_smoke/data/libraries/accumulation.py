"""Gradient accumulation of transformers: its models' own loss, and its Trainer."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from assay.models.transformers_logging import quiet_transformers
from assay.watchdog import temporary_folder
from assay_smoke.data.accumulation import STEPS, Step
from assay_smoke.data.checked_code import Subject
from assay_smoke.data.libraries.installed import is_installed, library_subject
from assay_smoke.data.protocols import BackwardStep


def library_accumulation() -> list[tuple[Subject, BackwardStep, Sequence[Step]]]:
    """Return each subject with its step function and its steps. Trainer runs in one process here."""
    found: list[tuple[Subject, BackwardStep, Sequence[Step]]] = [
        (library_subject("transformers", "num_items_in_batch"), model_loss, STEPS)
    ]
    if is_installed("accelerate"):
        one_rank = [step for step in STEPS if len(step) == 1]
        subject = library_subject("transformers", "Trainer(gradient_accumulation_steps)")
        found.append((subject, trainer_step, one_rank))
    return found


def model_loss(
    model: nn.Module,
    micro_batches: Sequence[Mapping[str, Tensor]],
    num_step_tokens: int,
    num_ranks: int,
) -> None:
    """Accumulate by the loss of transformers' models, given the label tokens of the step."""
    for micro_batch in micro_batches:
        loss = model(**micro_batch, num_items_in_batch=num_step_tokens).loss
        (loss * num_ranks).backward()


def trainer_step(
    model: nn.Module,
    micro_batches: Sequence[Mapping[str, Tensor]],
    _num_step_tokens: int,
    _num_ranks: int,
) -> None:
    """Accumulate by one step of Trainer, which counts the label tokens itself."""
    with temporary_folder("assay-trainer-") as folder, quiet_transformers():
        gradients = _run_step(model, micro_batches, str(folder))
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]


def _run_step(
    model: nn.Module, micro_batches: Sequence[Mapping[str, Tensor]], folder: str
) -> dict[str, Tensor]:
    """Return the gradients that reach the optimizer. Its learning rate of 0 changes nothing."""
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

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

    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=1,
        gradient_accumulation_steps=len(micro_batches),
        learning_rate=0.0,
        max_grad_norm=0.0,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = GivenBatches(
        model=model, args=arguments, train_dataset=[{}], callbacks=[KeepGradients()]
    )
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.train()
    return gradients
