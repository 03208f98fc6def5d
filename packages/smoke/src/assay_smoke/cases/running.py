"""Runs a case: translates it to core's terms, launches its worlds in turn and judges their answers."""

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from assay.errors import name_some
from assay.files import read_sealed, write_sealed
from assay.judge.levels import (
    LevelResult,
    failed,
    level_of,
    not_compared,
    not_run,
    notes_of,
    passed,
)
from assay.judge.replays import Judged, describe_stages_level
from assay.judge.wording import format_number
from assay.launch import Rank, TimeLimits, World, WorldError, call
from assay.noise import TENSOR_FLOOR
from assay.runs import Progress
from assay.runs.folders import locked
from assay.statistics import Statistic
from assay.training.check import load_training_limits, options_for
from assay.training.judging import free_run
from assay.training.judging.diagnosis import diagnose_free_run
from assay.training.judging.evidence import FreeEvidence
from assay.training.protocol import MIXED_PRECISION
from assay.training.reports import FreeRun, StepRecord, TrainCheck, TrainOptions
from assay.verdicts import Diagnosis, Location, Measurement, Ratio, Verdict
from assay_smoke.cases import worlds
from assay_smoke.judging import (
    differing_keys,
    failed_checkpoint,
    find_wrong_movement,
    write_verdict,
)
from assay_smoke.machine import Leftover, find_in_group, record_leftovers
from assay_smoke.matrix.rules import FEATURES, HOST, Case, FeatureEntry, Framework
from assay_smoke.timelines import where_it_stopped
from assay_smoke.trainers.deepspeed.trainer import compile_ahead

# Two steps, a checkpoint, two steps.
STEPS, RESUME_AT = 4, 2

_REFERENCE = "cpu/float32"

TRAINERS: dict[Framework, str] = {
    "one-process": "reference", "ddp": "ddp", "fsdp": "fsdp", "tensor-parallel": "tensor-parallel",
    "pipeline": "pipeline", "zero1": "deepspeed-zero1", "zero2": "deepspeed-zero2",
    "zero3": "deepspeed-zero3",
}  # fmt: skip


def is_deepspeed(trainer: str) -> bool:
    """Return whether the named trainer is one of DeepSpeed's."""
    return trainer.startswith("deepspeed")


def mesh_of(case: Case) -> dict[str, int]:
    """Return the mesh: all cards on the axis over which the framework spreads training, if it does."""
    axis = {"tensor-parallel": "tp", "pipeline": "pp"}.get(case.framework, "dp")
    return {} if case.framework == "one-process" else {axis: case.cards}


def options_of(case: Case) -> TrainOptions:
    """Return the training options. Every dp rank and every pipeline stage has at least one micro-batch."""
    shares = 1 if case.framework == "tensor-parallel" else case.cards
    changed = {key: value for entry in _entries(case) for key, value in entry.options.items()}
    micro_batches = shares * math.prod(entry.micro_batches for entry in _entries(case))
    base = {"model": f"micro:{case.family}", "steps": STEPS, "resume_at": RESUME_AT}
    options = TrainOptions(**base, micro_batches=micro_batches, **changed)
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


def prepare(case: Case, trainer: str | None, folder: Path, progress: Progress) -> None:
    """Compile what the trainer of `case` needs, since the time limits of worlds leave no room for it.

    trainer: replaces the framework's own; folder: an existing one, for logs.
    Raises: MachineError if compilation fails.
    """
    if is_deepspeed(trainer or TRAINERS[case.framework]) and "offload" in case.features:
        compile_ahead(folder, progress)


@dataclass
class CaseRun:
    """A case on one device: its worlds, and the answers of their ranks, empty for a world that did not run."""

    case: Case
    device: str
    """As in a RUN."""
    references: Path
    """Folder of the reference runs of a session, shared by its processes."""
    trainer: str | None = None
    """Replaces the framework's own trainer."""
    limits: TimeLimits = field(kw_only=True)
    """Of each world."""
    reference: worlds.ReferenceAnswer = field(init=False)
    trained: list[worlds.TrainAnswer] = field(default_factory=list, init=False)
    terminated: list[tuple[list[StepRecord], bool]] = field(default_factory=list, init=False)
    """Steps, and True if SIGTERM arrived."""
    resumed: list[FreeRun] = field(default_factory=list, init=False)
    restarted: list[StepRecord] = field(default_factory=list, init=False)
    read: list[worlds.ReadAnswer] = field(default_factory=list, init=False)
    left_behind: list[Leftover] = field(default_factory=list, init=False)

    @cached_property
    def options(self) -> TrainOptions:
        """Return the training options."""
        return options_of(self.case)

    @cached_property
    def free(self) -> FreeEvidence:
        """Return the free run with its resumption in the same process."""
        return FreeEvidence(
            self.options,
            self.case.precision,
            self.reference.training,
            [answer.report for answer in self.trained],
            load_training_limits("training"),
        )

    @cached_property
    def in_new_processes(self) -> FreeEvidence:
        """Return the free run with the resumption in new processes instead, and no findings on its own."""
        reports = []
        for rank, resumed in zip(self.trained, self.resumed, strict=True):
            free = rank.report.free
            ends = held_at_end(free), held_at_end(resumed)
            differ = differing_keys(*ends) if resumed.held else set()  # else it ended too early
            changed = replace(
                free,
                resumed=resumed.resumed,
                resumed_trajectory=resumed.resumed_trajectory,
                ended_otherwise=sorted(differ),
                problem=resumed.problem,
                not_restored=[],
                saved=[],
                changed_by_saving=[],
                settings=[],
            )
            reports.append(replace(rank.report, free=changed))
        return replace(self.free, reports=reports)

    def run(self, folder: Path, progress: Progress) -> Verdict:
        """Run all worlds of the case, judge them, and write the verdict into `folder`.

        Raises: MachineError if the compilation for its trainer fails.
        """
        prepare(self.case, self.trainer, folder, progress)
        # A second try must not see the answers of the first.
        return replace(self)._run(folder, progress)  # noqa: SLF001 - of the same class

    def _run(self, folder: Path, progress: Progress) -> Verdict:
        try:
            with progress.step(f"{self.case.id}: reference"):
                golden = self._open_reference()
        except WorldError as error:
            return self._end_early(not_compared(f"the reference run ended: {error}"), {}, folder)
        try:
            self._run_worlds(golden, folder, progress)
        except WorldError as error:
            files = (folder / "timelines").glob("*/rank-*.jsonl")
            newest_first = sorted(files, key=lambda file: file.stat().st_mtime)[::-1]
            phase = next(filter(None, map(where_it_stopped, newest_first)), None)
            ended = failed(0, f"the run ended{f' in {phase}' if phase else ''}: {error}")
            return self._end_early(ended, {"run": _REFERENCE}, folder)
        found = {name: judge(self) for name, judge in _LEVELS.items()}
        # The first level with a diagnosis provides that of the verdict.
        causes = (one.cause for one in found.values() if one.cause and one.cause.diagnosis)
        return write_verdict(
            found,
            folder,
            next(causes, None),
            model=self.reference.training.model,
            reference=self.reference.training.reference,
            candidate=self.free.report.run | {"case": self.case.id},
            notes=dict.fromkeys(notes_of(found)),
        )

    def _end_early(self, found: LevelResult, reference: dict[str, str], folder: Path) -> Verdict:
        """Write the verdict on a case whose reference or ranks ended before their end."""
        model, candidate = {"name": f"micro:{self.case.family}"}, {"case": self.case.id}
        levels = {"run": found}
        return write_verdict(levels, folder, model=model, reference=reference, candidate=candidate)

    def _open_reference(self) -> Path:
        """Return the folder of the reference states, and keep the answer of the reference.

        It is trained once in a session for each set of options and dtype.
        """
        # Only the dtype of the candidate counts.
        check = TrainCheck(self.options, _REFERENCE, f"cpu/{self.case.precision}")
        key = f"{check.options.model_dump_json()} {check.dtype}"
        golden = self.references / hashlib.sha256(key.encode()).hexdigest()[:12]
        golden.mkdir(parents=True, exist_ok=True)
        kept = golden / "answer.json"
        with locked(golden / "lock"):
            if kept.is_file():
                self.reference = read_sealed(worlds.ReferenceAnswer, kept)
                return golden
            world = World({"dp": 1}, "cpu", limits=self.limits, preload=EVERY_CASE)
            request = replace(check, folder=golden)
            (self.reference,) = call(worlds.train_reference, request, world=world, folder=golden)
            write_sealed(kept, self.reference)
        return golden

    def _run_worlds(self, golden: Path, folder: Path, progress: Progress) -> None:
        """Run the worlds one after the other, and keep their answers and the processes left."""
        case, checkpoint = self.case, worlds.CHECKPOINT
        trainer = self.trainer or TRAINERS[case.framework]
        candidate = TrainCheck(
            self.options,
            _REFERENCE,
            f"{self.device}/{case.precision}",
            golden=golden,
            folder=folder / "ranks",
            trainer=trainer,
            mesh=mesh_of(case),
            features=tuple(features_of(case)),
        )

        def launch(
            body: Callable[[worlds.CaseRequest, Progress, Rank], Any], checkpoint: str = ""
        ) -> list[Any]:
            """Run `body` on every rank of a world, which gets its name, and return the answers by rank."""
            name = body.__name__
            logs = folder / "logs" / name
            logs.mkdir(parents=True, exist_ok=True)
            mesh = {} if name == "read" else mesh_of(case)
            preload = preload_for(case, trainer, self.device)
            world = World(mesh or {"dp": 1}, self.device, limits=self.limits, preload=preload)
            timelines = folder / "timelines" / name
            request = worlds.CaseRequest(candidate, case.checkpoint, timelines, folder / checkpoint)
            with progress.step(f"{case.id}: {name}"):
                return call(
                    body,
                    request,
                    world=world,
                    folder=logs,
                    at_end=lambda group: self.left_behind.extend(find_in_group(group)),
                )

        with record_leftovers(folder / "temporary", self.left_behind):
            self.trained = launch(worlds.train)
            if case.interruption == "sigterm":
                checkpoint = worlds.TERMINATED_CHECKPOINT
                self.terminated = launch(worlds.terminate)
            if (folder / checkpoint).is_dir():
                self.resumed = launch(worlds.resume, checkpoint)
            if case.checkpoint == "hugging-face" and (folder / worlds.CHECKPOINT).is_dir():
                self.restarted = launch(worlds.restart, worlds.CHECKPOINT)
            if (folder / worlds.LAST_CHECKPOINT).is_dir():
                self.read = launch(worlds.read, worlds.LAST_CHECKPOINT)


def held_at_end(run: FreeRun) -> dict[str, str]:
    """Return the hash of every part of a parameter or moment that a rank holds after its last step."""
    return {str(part): digest for step in run.held[-1:] for part, digest in step}


# Merging in float64 changes weights and logits by rounding alone. A merge in float32 would leave 1e-8.
_EXACT_IN_FLOAT64 = 1e-10

_RANKS_DRAW = "each rank draws its own dropout masks"

# Share of a rank's parameters that may outlive a tear-down. Cached tensors, such as masks, are smaller.
_KEPT = 0.5


def _judge_movement(run: CaseRun) -> LevelResult:
    """Compare hashes of every parameter and buffer before the first and after the last step."""
    before, after = (
        {name.removeprefix("model."): digest for rank in ranks for name, digest in rank.items()}
        for ranks in zip(*((rank.before, rank.after) for rank in run.trained), strict=True)
    )
    trainable = {row.parameter for row in run.reference.training.noise_trajectory}
    for names in run.reference.training.shared:
        trainable |= set(names) if trainable & set(names) else set()
    expected = trainable & set(run.reference.moved) & before.keys()
    found = find_wrong_movement(
        before,
        after,
        (expected, f"of {len(expected)} trained parameters"),
        (before.keys() - trainable, "frozen parameters or buffers"),
        lambda name: {"module": name.rpartition(".")[0]},
    )
    if found is None and not expected:
        return not_compared("the noise run changes no parameter of this run")
    return found or passed(len(before))


def _judge_losses(run: CaseRun) -> LevelResult:
    curves = free_run.rows_of_free_run(run.free)
    for rank, answer in enumerate(run.trained):
        for step in [*answer.report.free.steps, *answer.report.free.resumed]:
            if not math.isfinite(step.loss):
                reason = f"loss {step.loss} in step {step.step}"
                location = Location(phase="forward", step=step.step, rank=rank)
                return failed(1, reason, "non-finite", location).with_rows(curves)
    judged, notes = free_run.judge_losses(run.free)
    if judged is None:
        return not_compared(notes[0]).with_rows(curves, notes)
    return _by_ratios("loss", run, [judged], notes).with_rows(curves)


def _judge_updates(run: CaseRun) -> LevelResult:
    if gap := free_run.trajectory_gap(run.free):
        return not_compared(gap)
    judged = [
        item for item in free_run.judge_trajectory(run.free) if "resumed" not in item.port.port
    ]
    if not judged:
        return not_compared(_RANKS_DRAW)
    return _by_ratios("updates", run, judged, free_run.notes_on_rounding(run.free))


def _judge_resume(run: CaseRun) -> LevelResult:
    """Compare the run that resumed in new processes with the uninterrupted one."""
    if not run.resumed:
        return _failed_checkpoint(run, "no checkpoint was left to resume from")
    free = run.in_new_processes
    result = free_run.judge_checkpoint(free)
    apart = [item for item in free_run.judge_trajectory(free) if item.failed]
    if apart and result.cause is None:
        return _by_ratios("resume", run, apart, result.notes)
    rows = [row.model_copy(update={"level": "resume"}) for row in result.measurements]
    # The level `checkpoint` has counted the comparisons of the checkpoint itself.
    compared = len({(row.step, row.port) for row in rows}) + len(held_at_end(run.resumed[0]))
    level = result.level.model_copy(update={"compared": compared})
    return LevelResult(level, rows, result.notes, cause=result.cause)


def _judge_termination(run: CaseRun) -> LevelResult:
    if run.case.interruption != "sigterm":
        return not_run("the case does not send SIGTERM")
    for rank, (steps, was_signalled) in enumerate(run.terminated):
        if not was_signalled:
            return failed(1, f"SIGTERM in the middle of a step did not reach rank {rank}")
        if [step.step for step in steps] != list(range(run.options.resume_at)):
            return failed(1, f"rank {rank} did not finish the step in which SIGTERM reached it")
    if not run.resumed:
        return _failed_checkpoint(run, "no checkpoint was written after SIGTERM")
    return passed(len(run.terminated))


def _judge_tear_down(run: CaseRun) -> LevelResult:
    for rank, answer in enumerate(run.trained):
        if answer.kept_bytes > _KEPT * answer.parameter_bytes:
            return failed(
                1,
                f"rank {rank}: {answer.kept_bytes:,} bytes of tensors outlive two tear-downs; the rank has"
                f" {answer.parameter_bytes:,} bytes of parameters: {', '.join(answer.kept_shapes)}",
            )
    return passed(
        len(run.trained),
        kept_bytes=max(answer.kept_bytes for answer in run.trained),
        parameter_bytes=min(answer.parameter_bytes for answer in run.trained),
    )


def _by_ratios(name: str, run: CaseRun, judged: list[Judged], notes: list[str]) -> LevelResult:
    over = [item for item in judged if item.failed]
    level = level_of(len(judged), len(over), describe_stages_level(judged))
    rows = [item.measurement(name, f"{item.port.module}:{item.port.port}") for item in judged]
    fault = diagnose_free_run(run.free, over) if over else None
    return LevelResult(level, rows, notes, judged, cause=fault)


def _by_ratio(run: CaseRun, statistic: Statistic, error: float, noise: float) -> Ratio:
    """Judge one error by the limit of its statistic. noise: at least the floor of a tensor counts."""
    floor = TENSOR_FLOOR * run.free.unit_roundoff
    return Ratio(statistic, error, max(noise, floor)).judged(run.free.limits.of(statistic))


def _judge_reading(run: CaseRun) -> LevelResult:
    """Judge the logits of the last checkpoint's model, loaded as users load it.

    Final logits follow from the final parameters, so they share their limit.
    """
    if not run.read:
        return _failed_checkpoint(run, "the last checkpoint is missing")
    (answer,) = run.read
    if answer.problem is not None or answer.logits_error is None:
        return _failed_checkpoint(run, f"the model cannot be loaded: {answer.problem}")
    if wrong := _adapter_problem(answer):
        return _failed_checkpoint(run, wrong, 1)
    judged = _by_ratio(run, "trajectory-error", answer.logits_error, run.reference.logits_noise)
    if run.reference.training.draws and run.free.on_ranks:
        return not_compared(_RANKS_DRAW)
    rows = [judged.measurement("users", "logits")]
    if judged.failed:
        reason = (
            f"the saved model computes different logits: relative error {format_number(answer.logits_error)},"
            f" {format_number(judged.value)}x the noise run's (limit {format_number(judged.limit)}x)"
        )
        return _failed_checkpoint(run, reason, 1, rows)
    return passed(1, noise_ratio=judged.value, limit=judged.limit).with_rows(rows)


def _judge_restart(run: CaseRun) -> LevelResult:
    """Compare the first loss of a run from the saved model with the next loss of the saving run."""
    if run.case.checkpoint != "hugging-face":
        return not_run("only a Hugging Face checkpoint is restarted from")
    if not run.restarted:
        return _failed_checkpoint(run, "no checkpoint exists that another run could start from")
    expected = run.free.report.free.steps[run.options.resume_at].loss
    error = abs(run.restarted[0].loss - expected) / abs(expected)
    judged = _by_ratio(run, "loss-error", error, 0.0)
    rows = [judged.measurement("restart", "loss")]
    if not judged.failed:
        return passed(1, noise_ratio=judged.value).with_rows(rows)
    reason = (
        f"a run from the saved model begins with the loss {run.restarted[0].loss}; the run that saved"
        f" it continued with {expected}"
    )
    return _failed_checkpoint(run, reason, 1, rows)


def _adapter_problem(answer: worlds.ReadAnswer) -> str | None:
    if answer.adapter_effect is None:
        return None
    if not answer.adapter_effect > 0:
        return "the saved adapter changes nothing: its tensors are empty or zero"
    for how, error in answer.merged_errors.items():
        if not error <= _EXACT_IN_FLOAT64:
            return f"the adapter {how} changes the logits: relative error {error}"
    return None


def _failed_checkpoint(
    run: CaseRun, reason: str, compared: int = 0, rows: Iterable[Measurement] = ()
) -> LevelResult:
    """Return a failed level for a checkpoint."""
    options = run.options
    diagnosis: Diagnosis = "adapter-mismatch" if options.lora else "checkpoint-mismatch"
    return failed_checkpoint(options.steps, compared, reason, rows, diagnosis=diagnosis)


# The levels in the order of the verdict.
_LEVELS: dict[str, Callable[[CaseRun], LevelResult]] = {
    "trained": _judge_movement,
    "loss": _judge_losses,
    "updates": _judge_updates,
    "replicas": lambda run: free_run.judge_replicas(run.free),
    "checkpoint": lambda run: free_run.judge_checkpoint(run.free),
    "sigterm": _judge_termination,
    "resume": _judge_resume,
    "restart": _judge_restart,
    "users": _judge_reading,
    "tear-down": _judge_tear_down,
    "left behind": lambda run: (
        failed(1, name_some([*map(str, run.left_behind)])) if run.left_behind else passed(1)
    ),
}
