"""Runs a case: translates it to core's terms, launches its worlds in turn and judges their answers."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from assay.files import read_sealed, write_sealed
from assay.judge.levels import LevelResult, failed, not_compared
from assay.launch import Rank, TimeLimits, World, WorldError, call
from assay.runs import Progress
from assay.runs.folders import locked
from assay.runs.results import write_results
from assay.training.check import load_training_limits, options_for
from assay.training.protocol import MIXED_PRECISION
from assay.training.reports import TrainCheck, TrainOptions
from assay.verdicts import Measurement, Verdict
from assay_smoke.cases import worlds
from assay_smoke.cases.timeline import where_it_stopped
from assay_smoke.cases.verdict import CaseEvidence, judge_case
from assay_smoke.cases.worlds import (
    CHECKPOINT,
    LAST_CHECKPOINT,
    TERMINATED_CHECKPOINT,
    CaseRequest,
    ReferenceAnswer,
    train_reference,
)
from assay_smoke.judging import verdict_of
from assay_smoke.machine import Leftover, find_in_group, record_leftovers
from assay_smoke.matrix.cases import FEATURES, Case, FeatureEntry, Framework
from assay_smoke.matrix.rules import HOST
from assay_smoke.trainers.deepspeed.process import compile_ahead

# Two steps, a checkpoint, two steps.
STEPS, RESUME_AT = 4, 2

REFERENCE = "cpu/float32"

TRAINERS: dict[Framework, str] = {
    "one-process": "reference",
    "ddp": "ddp",
    "fsdp": "fsdp",
    "tensor-parallel": "tensor-parallel",
    "pipeline": "pipeline",
    "zero1": "deepspeed-zero1",
    "zero2": "deepspeed-zero2",
    "zero3": "deepspeed-zero3",
}


def is_deepspeed(trainer: str) -> bool:
    """Return whether the named trainer is one of DeepSpeed's."""
    return trainer.startswith("deepspeed")


def mesh_of(case: Case) -> dict[str, int]:
    """Return the mesh: all cards on the axis over which the framework spreads training."""
    axis = {"tensor-parallel": "tp", "pipeline": "pp"}.get(case.framework, "dp")
    return {axis: case.cards}


def options_of(case: Case) -> TrainOptions:
    """Return the training options. Every dp rank and every pipeline stage has at least one micro-batch."""
    shares = 1 if case.framework == "tensor-parallel" else case.cards
    changed = {key: value for entry in _entries(case) for key, value in entry.options.items()}
    options = TrainOptions(
        model=f"micro:{case.family}",
        steps=STEPS,
        resume_at=RESUME_AT,
        micro_batches=shares * math.prod(entry.micro_batches for entry in _entries(case)),
        **changed,
    )
    return options_for(options, mesh_of(case), features_of(case))


def _entries(case: Case) -> list[FeatureEntry]:
    return [entry for name, entry in FEATURES.items() if name in case.features]


def features_of(case: Case) -> list[str]:
    """Return the features of the training plan, without LoRA."""
    features = [one.trainer_feature for one in _entries(case) if one.trainer_feature is not None]
    if case.precision == "float16":
        features += [MIXED_PRECISION, "loss-scaling"]
    if case.batches == "packed":
        features.append("packed")
    return sorted(features)


_ANSWER_FILE = "answer.json"

# Modules that the fork server of the worlds imports once for all ranks.
EVERY_CASE = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",  # shared by all decoders
    "assay_smoke.cases.worlds",
)


def preload_for(case: Case, trainer: str, device: str) -> tuple[str, ...]:
    """Return the modules to preload. device: as in a RUN.

    Libraries that may open a device are preloaded only for the host: a fork cannot use a device that its
    parent opened.
    """
    modules = [*EVERY_CASE]
    if device == HOST and "compile" in case.features:
        modules.append("torch._inductor.compile_fx")
    if device == HOST and is_deepspeed(trainer):
        modules.append("assay_smoke.cases.preloaded_deepspeed")
    return tuple(modules)


def open_reference(
    case: Case, references: Path, limits: TimeLimits
) -> tuple[Path, ReferenceAnswer]:
    """Return the folder of the reference states for `case`, and the answer of the reference.

    It is trained once in a session for each set of options and dtype.

    references: shared by the processes of a session.
    """
    # Only the dtype of the candidate counts.
    check = TrainCheck(options_of(case), REFERENCE, f"cpu/{case.precision}")
    key = f"{check.options.model_dump_json()} {check.dtype}"
    golden = references / hashlib.sha256(key.encode()).hexdigest()[:12]
    golden.mkdir(parents=True, exist_ok=True)
    kept = golden / _ANSWER_FILE
    with locked(golden / "lock"):
        if kept.is_file():
            return golden, read_sealed(ReferenceAnswer, kept)
        world = World({"dp": 1}, "cpu", limits=limits, preload=EVERY_CASE)
        request = replace(check, folder=golden)
        (answer,) = call(train_reference, request, world=world, folder=golden)
        write_sealed(kept, answer)
    return golden, answer


def prepare(case: Case, trainer: str | None, folder: Path, progress: Progress) -> None:
    """Compile what the trainer of `case` needs, since the time limits of worlds leave no room for it.

    trainer: replaces the framework's own; folder: an existing one, for logs.
    Raises: MachineError if compilation fails.
    """
    if is_deepspeed(trainer or TRAINERS[case.framework]) and "offload" in case.features:
        compile_ahead(folder, progress)


@dataclass(frozen=True)
class CaseRun:
    """A case on one device."""

    case: Case
    device: str
    """As in a RUN."""
    references: Path
    """Folder of the reference runs of a session."""
    trainer: str | None = None
    """Replaces the framework's own trainer."""
    limits: TimeLimits = field(
        default_factory=lambda: TimeLimits(
            start_seconds=120.0, collective_seconds=60.0, body_seconds=300.0
        )
    )
    """Limits of each world."""

    def run(self, folder: Path, progress: Progress) -> Verdict:
        """Run all worlds of the case, judge them, and write the verdict into `folder`.

        Raises: MachineError if the compilation for its trainer fails.
        """
        prepare(self.case, self.trainer, folder, progress)
        verdict, measurements = self._judge(folder, progress)
        return write_results(verdict, measurements, folder)

    def _judge(self, folder: Path, progress: Progress) -> tuple[Verdict, list[Measurement]]:
        try:
            with progress.step(f"{self.case.id}: reference"):
                golden, reference = open_reference(self.case, self.references, self.limits)
        except WorldError as error:
            return self._end_early(not_compared(f"the reference run ended: {error}"), {}), []
        limits = load_training_limits("training")
        options = options_of(self.case)
        evidence = CaseEvidence(case=self.case, options=options, reference=reference, limits=limits)
        try:
            self._run_worlds(golden, folder, progress, evidence)
        except WorldError as error:
            phase = _stopped_in(folder)
            reason = f"the run ended{f' in {phase}' if phase else ''}: {error}"
            return self._end_early(failed(0, reason), {"run": REFERENCE}), []
        return judge_case(evidence)

    def _end_early(self, found: LevelResult, reference: dict[str, str]) -> Verdict:
        """Make the verdict on a case whose reference or ranks ended before their end."""
        model = {"name": f"micro:{self.case.family}"}
        candidate = {"case": self.case.id}
        return verdict_of({"run": found}, model=model, reference=reference, candidate=candidate)

    def _run_worlds(
        self, golden: Path, folder: Path, progress: Progress, evidence: CaseEvidence
    ) -> None:
        """Run the worlds one after the other. Their answers go into `evidence`, as do processes left."""
        case, checkpoint = self.case, CHECKPOINT
        launch = partial(self._launch, golden, folder, progress, evidence.left_behind)
        with record_leftovers(folder / "temporary", evidence.left_behind):
            evidence.trained = launch(worlds.train)
            if case.interruption == "sigterm":
                checkpoint = TERMINATED_CHECKPOINT
                evidence.terminated = launch(worlds.terminate)
            if (folder / checkpoint).is_dir():
                evidence.resumed = launch(worlds.resume, checkpoint)
            if case.checkpoint == "hugging-face" and (folder / CHECKPOINT).is_dir():
                evidence.restarted = launch(worlds.restart, CHECKPOINT)
            if (folder / LAST_CHECKPOINT).is_dir():
                (evidence.read,) = launch(worlds.read, LAST_CHECKPOINT)

    def _launch(
        self,
        golden: Path,
        folder: Path,
        progress: Progress,
        left_behind: list[Leftover],
        body: Callable[[CaseRequest, Progress, Rank], Any],
        checkpoint: str = "",
    ) -> list[Any]:
        """Run `body` on every rank of a world, which gets its name, and return the answers by rank."""
        case, device, name = self.case, self.device, body.__name__
        trainer = self.trainer or TRAINERS[case.framework]
        logs = folder / "logs" / name
        logs.mkdir(parents=True, exist_ok=True)
        world = World(
            {"dp": 1} if name == "read" else mesh_of(case),
            device,
            limits=self.limits,
            preload=preload_for(case, trainer, device),
        )
        request = CaseRequest(
            candidate=TrainCheck(
                options_of(case),
                REFERENCE,
                f"{device}/{case.precision}",
                golden=golden,
                folder=folder / "ranks",
                trainer=trainer,
                mesh=mesh_of(case),
                features=tuple(features_of(case)),
            ),
            kind=case.checkpoint,
            timelines=folder / "timelines" / name,
            checkpoint=folder / checkpoint,
        )
        with progress.step(f"{case.id}: {name}"):
            return call(
                body,
                request,
                world=world,
                folder=logs,
                at_end=lambda group: left_behind.extend(find_in_group(group)),
            )


def _stopped_in(folder: Path) -> str | None:
    """Return the phase in which the last world ended early."""
    files = (folder / "timelines").glob("*/rank-*.jsonl")
    newest_first = sorted(files, key=lambda file: file.stat().st_mtime)[::-1]
    return next(filter(None, map(where_it_stopped, newest_first)), None)
