"""Runs a case: launches its worlds one after the other and judges their answers."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from assay.files import read_sealed, write_sealed
from assay.launch import Rank, TimeLimits, World, WorldError, launch_world
from assay.runs import Progress
from assay.runs.caches import locked
from assay.runs.results import write_results
from assay.training.check import load_training_limits
from assay.training.processes.requests import ReferenceRequest
from assay.verdicts import Outcome, Verdict
from assay_smoke.cases import reading, worlds
from assay_smoke.cases.evidence import CaseEvidence
from assay_smoke.cases.requests import (
    CHECKPOINT,
    LAST_CHECKPOINT,
    TERMINATED_CHECKPOINT,
    CaseRequest,
    ReferenceAnswer,
)
from assay_smoke.cases.settings import (
    REFERENCE,
    TRAINERS,
    is_deepspeed,
    mesh_of,
    options_of,
    request_of,
)
from assay_smoke.cases.timeline import where_it_stopped
from assay_smoke.cases.verdict import judge_case, verdict_of_early_end
from assay_smoke.machine.leftovers import find_in_group, record_leftovers
from assay_smoke.matrix.cases import Case
from assay_smoke.matrix.rules import HOST
from assay_smoke.trainers.deepspeed.compiling import compile_ahead

_Answer = TypeVar("_Answer")

_ANSWER_FILE = "answer.json"

# Modules that the fork server of the worlds imports once for all ranks.
EVERY_CASE = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",  # shared by all decoders
    "assay_smoke.cases.worlds",
    "assay_smoke.cases.reading",
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
    request = ReferenceRequest(
        options=options_of(case), reference=REFERENCE, dtype=case.precision, folder=""
    )
    key = hashlib.sha256(request.model_dump_json().encode()).hexdigest()[:12]
    golden = references / key
    golden.mkdir(parents=True, exist_ok=True)
    kept = golden / _ANSWER_FILE
    with locked(golden / "lock"):
        if kept.is_file():
            return golden, read_sealed(ReferenceAnswer, kept)
        asked = request.model_copy(update={"folder": str(golden)})
        world = World({"dp": 1}, "cpu", limits=limits, preload=EVERY_CASE, log_folder=golden)
        (answer,) = launch_world(worlds.reference, world, asked)
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
    folder: Path
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

    def run(self, progress: Progress) -> Verdict:
        """Run all worlds of the case, judge them, and write the verdict into `folder`.

        Raises: MachineError if the compilation for its trainer fails.
        """
        prepare(self.case, self.trainer, self.folder, progress)
        try:
            with progress.step(f"{self.case.id}: reference"):
                golden, reference = open_reference(self.case, self.references, self.limits)
        except WorldError as error:
            reason = f"the reference run ended: {error}"
            verdict = verdict_of_early_end(self.case, Outcome.NOT_COMPARED, reason)
            return write_results(verdict, [], self.folder)
        try:
            evidence = self._gather(golden, reference, progress)
        except WorldError as error:
            phase = self._stopped_in()
            reason = f"the run ended{f' in {phase}' if phase else ''}: {error}"
            verdict = verdict_of_early_end(self.case, Outcome.FAIL, reason, {"run": REFERENCE})
            return write_results(verdict, [], self.folder)
        verdict, measurements = judge_case(self.case, evidence)
        return write_results(verdict, measurements, self.folder)

    def _gather(self, golden: Path, reference: ReferenceAnswer, progress: Progress) -> CaseEvidence:
        """Run the worlds one after the other."""
        case, folder = self.case, self.folder
        candidate = request_of(case, self.device, str(golden), str(folder / "ranks"), self.trainer)
        evidence = CaseEvidence(
            request=CaseRequest(candidate=candidate, kind=case.checkpoint, timelines=""),
            dtype=case.precision,
            reference=reference,
            limits=load_training_limits("training"),
        )
        launch = partial(self._launch, evidence, progress)
        with record_leftovers(folder / "temporary", evidence.left_behind):
            evidence.trained = launch("train", worlds.train)
            checkpoint = CHECKPOINT
            if case.interruption == "sigterm":
                checkpoint = TERMINATED_CHECKPOINT
                evidence.terminated = launch("terminate", worlds.terminate)
            if (folder / checkpoint).is_dir():
                evidence.resumed = launch("resume", worlds.resume, checkpoint)
            if case.checkpoint == "hugging-face" and (folder / CHECKPOINT).is_dir():
                evidence.restarted = launch("restart", worlds.restart, CHECKPOINT)
            if (folder / LAST_CHECKPOINT).is_dir():
                (evidence.read,) = launch("read", reading.read, LAST_CHECKPOINT)
        return evidence

    def _launch(
        self,
        evidence: CaseEvidence,
        progress: Progress,
        name: str,
        body: Callable[[Rank, CaseRequest], _Answer],
        checkpoint: str = "",
    ) -> list[_Answer]:
        """Run `body` on every rank of a world and return the answers by rank.

        Processes that outlive their ranks are added to the evidence.
        """
        logs = self.folder / "logs" / name
        logs.mkdir(parents=True, exist_ok=True)
        trainer = self.trainer or TRAINERS[self.case.framework]
        world = World(
            {"dp": 1} if name == "read" else mesh_of(self.case),
            self.device,
            limits=self.limits,
            preload=preload_for(self.case, trainer, self.device),
            log_folder=logs,
            at_end=lambda group: evidence.left_behind.extend(find_in_group(group)),
        )
        asked = evidence.request.model_copy(
            update={
                "timelines": str(self.folder / "timelines" / name),
                "checkpoint": str(self.folder / checkpoint) if checkpoint else "",
            }
        )
        with progress.step(f"{self.case.id}: {name}"):
            return launch_world(body, world, asked)

    def _stopped_in(self) -> str | None:
        """Return the phase in which the last world ended early."""
        files = sorted(
            (self.folder / "timelines").glob("*/rank-*.jsonl"),
            key=lambda file: file.stat().st_mtime,
        )
        return next((phase for file in files[::-1] if (phase := where_it_stopped(file))), None)
