"""A case from the outside: its worlds one after the other, and its verdict."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from assay.files import read_sealed, write_sealed
from assay.launch import Rank, TimeLimits, World, WorldError, launch_world
from assay.runs import Progress
from assay.runs.caches import locked
from assay.runs.results import write_results
from assay.training.check import load_training_limits
from assay.training.processes.requests import ReferenceRequest
from assay.verdicts import Verdict
from assay_smoke.cases import reading, worlds
from assay_smoke.cases.judging.evidence import Answers, CaseEvidence
from assay_smoke.cases.judging.verdict import (
    judge_case,
    verdict_of_crash,
    verdict_without_reference,
)
from assay_smoke.cases.left_behind import leftovers_noted
from assay_smoke.cases.preloading import EVERY_CASE, preload_for
from assay_smoke.cases.requests import (
    CHECKPOINT,
    LAST_CHECKPOINT,
    TERMINATED_CHECKPOINT,
    CaseRequest,
    ReadAnswer,
    ReferenceAnswer,
    RestartAnswer,
    ResumeAnswer,
    TerminateAnswer,
    TrainAnswer,
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
from assay_smoke.machine.leftovers import Leftover, find_in_group
from assay_smoke.matrix.cases import Case
from assay_smoke.trainers.deepspeed.compiling import compile_ahead

Body = Callable[[Rank, dict[str, Any]], dict[str, Any]]

_ANSWER = "answer.json"


@dataclass
class References:
    """What the trusted side makes of each set of options and dtype: once in a session.

    folder: of the session, in which they are kept; several processes may use it.
    """

    folder: Path

    def of(self, case: Case, limits: TimeLimits) -> tuple[Path, ReferenceAnswer]:
        """The folder of the golden that `case` is held to, and what the trusted side said."""
        request = ReferenceRequest(
            options=options_of(case), reference=REFERENCE, dtype=case.precision, folder=""
        )
        key = hashlib.sha256(request.model_dump_json().encode()).hexdigest()[:12]
        golden = self.folder / key
        golden.mkdir(parents=True, exist_ok=True)
        kept = golden / _ANSWER
        with locked(golden / "lock"):
            if kept.is_file():
                return golden, read_sealed(ReferenceAnswer, kept)
            asked = request.model_copy(update={"folder": str(golden)})
            world = World({"dp": 1}, "cpu", limits=limits, preload=(EVERY_CASE,), log_folder=golden)
            (answer,) = launch_world(worlds.reference, world, asked.model_dump())
            made = ReferenceAnswer.model_validate(answer)
            write_sealed(kept, made)
        return golden, made


def prepare(case: Case, trainer: str | None, folder: Path, progress: Progress) -> None:
    """Compile what the trainer of `case` needs, if it was not: no world has the time to spare.

    trainer: in place of the framework's own; folder: an existing one, for logs.
    Raises: MachineError if it cannot be compiled here.
    """
    if is_deepspeed(trainer or TRAINERS[case.framework]) and "offload" in case.features:
        compile_ahead(folder, progress)


@dataclass(frozen=True)
class CaseRun:
    """One case on one device.

    trainer: in place of the framework's own; None: that.
    limits: of each of its worlds.
    """

    case: Case
    device: str
    folder: Path
    references: References
    trainer: str | None = None
    limits: TimeLimits = field(
        default_factory=lambda: TimeLimits(
            start_seconds=120.0, collective_seconds=60.0, body_seconds=300.0
        )
    )

    def run(self, progress: Progress) -> Verdict:
        """Run every world of the case, judge, and write the verdict into `folder`.

        Raises: MachineError if what its trainer needs cannot be compiled here.
        """
        prepare(self.case, self.trainer, self.folder, progress)
        try:
            with progress.step(f"{self.case.id}: reference"):
                golden, reference = self.references.of(self.case, self.limits)
        except WorldError as error:
            verdict = verdict_without_reference(self.case, str(error))
            return write_results(verdict, [], self.folder)
        try:
            evidence = self._gather(golden, reference, progress)
        except WorldError as error:
            verdict = verdict_of_crash(
                self.case, {"run": REFERENCE}, str(error), self._stopped_in()
            )
            return write_results(verdict, [], self.folder)
        verdict, measurements = judge_case(self.case, evidence)
        return write_results(verdict, measurements, self.folder)

    def _gather(self, golden: Path, reference: ReferenceAnswer, progress: Progress) -> CaseEvidence:
        left_behind: list[Leftover] = []
        with leftovers_noted(self.folder / "temporary", left_behind):
            answers = self._run_worlds(golden, progress, left_behind)
        return CaseEvidence(
            **vars(answers),
            dtype=self.case.precision,
            reference=reference,
            left_behind=left_behind,
            limits=load_training_limits("training"),
        )

    def _run_worlds(self, golden: Path, progress: Progress, left_behind: list[Leftover]) -> Answers:
        """What every world of the case answers, one after the other."""
        case, launch = self.case, partial(self._launch, progress, left_behind)
        candidate = request_of(
            case, self.device, str(golden), str(self.folder / "ranks"), self.trainer
        )
        request = CaseRequest(candidate=candidate, kind=case.checkpoint, timelines="")
        trained = [
            TrainAnswer.model_validate(answer)
            for answer in launch("train", worlds.train, request, "")
        ]
        terminated: list[TerminateAnswer] = []
        checkpoint = CHECKPOINT
        if case.interruption == "sigterm":
            checkpoint = TERMINATED_CHECKPOINT
            terminated = [
                TerminateAnswer.model_validate(answer)
                for answer in launch("terminate", worlds.terminate, request, "")
            ]
        resumed: list[ResumeAnswer] = []
        if (self.folder / checkpoint).is_dir():
            resumed = [
                ResumeAnswer.model_validate(answer)
                for answer in launch("resume", worlds.resume, request, checkpoint)
            ]
        restarted: list[RestartAnswer] = []
        if case.checkpoint == "hugging-face" and (self.folder / CHECKPOINT).is_dir():
            restarted = [
                RestartAnswer.model_validate(answer)
                for answer in launch("restart", worlds.restart, request, CHECKPOINT)
            ]
        read = None
        if (self.folder / LAST_CHECKPOINT).is_dir():
            (answer,) = launch("read", reading.read, request, LAST_CHECKPOINT)
            read = ReadAnswer.model_validate(answer)
        return Answers(request, trained, terminated, resumed, restarted, read)

    def _launch(
        self,
        progress: Progress,
        left_behind: list[Leftover],
        name: str,
        body: Body,
        request: CaseRequest,
        checkpoint: str,
    ) -> list[dict[str, Any]]:
        logs = self.folder / "logs" / name
        logs.mkdir(parents=True, exist_ok=True)
        axes: Mapping[str, int] = {"dp": 1} if name == "read" else mesh_of(self.case)
        trainer = self.trainer or TRAINERS[self.case.framework]
        preload = preload_for(self.case, trainer, self.device)
        world = World(
            axes,
            self.device,
            limits=self.limits,
            preload=preload,
            log_folder=logs,
            at_end=lambda group: left_behind.extend(find_in_group(group)),
        )
        asked = request.model_copy(
            update={
                "timelines": str(self.folder / "timelines" / name),
                "checkpoint": str(self.folder / checkpoint) if checkpoint else "",
            }
        )
        with progress.step(f"{self.case.id}: {name}"):
            return launch_world(body, world, asked.model_dump())

    def _stopped_in(self) -> str | None:
        """The phase in which the last world of the case ended too early."""
        files = sorted(
            (self.folder / "timelines").glob("*/rank-*.jsonl"),
            key=lambda file: file.stat().st_mtime,
        )
        return next((phase for file in files[::-1] if (phase := where_it_stopped(file))), None)
