"""One process of a cycle: trains, saves or resumes, and writes down what it saw. Judges nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.errors import AssayError, MachineError
from assay.models.size_policy import choose_threads
from assay.runs import Progress
from assay.runs.worker import serve
from assay.training.batches import MicroBatch, coder_of, training_batches
from assay.training.protocol import Trainer
from assay.training.state.files import fingerprint
from assay.training.trainers.adapters import ADAPTER_FILE, adapter_tensors, read_adapter
from assay.training.trainers.registry import open_trainer
from assay_smoke.reports import Fingerprint, PartReport, PartRequest, StepRecord


def work(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Answer a PartRequest with a PartReport."""
    asked = PartRequest.model_validate(request)
    return run_part(asked, progress).model_dump(mode="json")


def run_part(asked: PartRequest, progress: Progress) -> PartReport:
    """Set-up, steps, checkpoint and tear-down of one process."""
    cycle = asked.cycle
    batches = training_batches(
        coder_of(cycle.model),
        steps=cycle.steps,
        micro_batches=cycle.micro_batches,
        seed=cycle.seed,
    )
    with open_run(parse_run(cycle.run)).deterministic():
        with progress.step(f"{asked.part}: set-up"):
            trainer = open_trainer(cycle.trainer, cycle.training_plan).trainer
        part = _Part(asked, trainer, progress)
        try:
            if asked.part == "uninterrupted":
                part.train_and_save(batches)
            else:
                part.resume_and_save(batches)
        finally:
            trainer.teardown()
    return part.report


class _Part:
    def __init__(self, asked: PartRequest, trainer: Trainer, progress: Progress) -> None:
        self._asked, self._trainer, self._progress = asked, trainer, progress
        parameters = dict(trainer.model.named_parameters())
        choose_threads(sum(parameter.numel() for parameter in parameters.values()))
        if "lora" in asked.cycle.features:
            # Not what asks for gradients: a base that is not frozen would be among it.
            trainable = [f"model.{name}" for name in parameters if ".lora_" in name]
        else:
            trainable = [f"model.{name}" for name, p in parameters.items() if p.requires_grad]
        self.report = PartReport(trainable=trainable, at_start=self._parameters())

    def train_and_save(self, batches: Sequence[Sequence[MicroBatch]]) -> None:
        resume_at = self._asked.cycle.resume_at
        self._train(batches[:resume_at])
        self._save(Path(self._asked.checkpoint))
        self.report.at_checkpoint = fingerprint(self._trainer.state_dict())
        self._train(batches[resume_at:])
        self.report.at_end = self._parameters()

    def resume_and_save(self, batches: Sequence[Sequence[MicroBatch]]) -> None:
        try:
            self._trainer.load(Path(self._asked.checkpoint))
        except AssayError as error:
            self.report.problem = str(error)
            return
        self.report.at_checkpoint = fingerprint(self._trainer.state_dict())
        self._train(batches[self._asked.cycle.resume_at :])
        self.report.at_end = self._parameters()
        self._save(Path(self._asked.output))

    def _train(self, batches: Sequence[Sequence[MicroBatch]]) -> None:
        with self._progress.task(f"{self._asked.part}: steps", len(batches)) as task:
            for batch in batches:
                done = self._trainer.step(batch)
                self.report.steps.append(
                    StepRecord(
                        step=done.step,
                        loss=done.loss,
                        num_tokens=done.num_tokens,
                        grad_norm=done.grad_norm,
                    )
                )
                task.advance()

    def _save(self, folder: Path) -> None:
        with self._progress.step(f"{self._asked.part}: checkpoint"):
            self._trainer.save(folder)
        if "lora" in self._asked.cycle.features:
            self.report.adapter_in_memory = _adapter_fingerprint(
                adapter_tensors(self._trainer.model)
            )
            try:
                self.report.adapter_on_disk = _adapter_fingerprint(_find_adapter(folder))
            except AssayError as error:
                self.report.problem = str(error)

    def _parameters(self) -> Fingerprint:
        return fingerprint({"model": self._trainer.model.state_dict()})


def _adapter_fingerprint(tensors: Mapping[str, Tensor]) -> Fingerprint:
    return fingerprint({"model": tensors})


def _find_adapter(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.rglob(ADAPTER_FILE))
    if len(files) != 1:
        raise MachineError(f"the checkpoint in {folder} holds {len(files)} files {ADAPTER_FILE}")
    return read_adapter(files[0].parent)


if __name__ == "__main__":
    serve(work)
