"""The verdict over a cycle: everything here must be equal to the last bit.

Both runs do the same on the same device, with deterministic kernels where it has them: there is
no rounding that would excuse a difference.
"""

import math
from dataclasses import dataclass, field

from assay.comparing.levels import Finding, outcome_of_levels
from assay.errors import name_some
from assay.sites import Phase, unwrapped_path
from assay.verdicts import (
    Diagnosis,
    Level,
    Location,
    Measurement,
    Outcome,
    Unmatched,
    Verdict,
)
from assay_smoke.planning import Cycle
from assay_smoke.reports import Fingerprint, PartReport, StepRecord


@dataclass(slots=True)
class _Levels:
    """Levels in the order in which they explain each other: the first that fails is the cause."""

    levels: dict[str, Level] = field(default_factory=dict)
    finding: Finding | None = None

    def passed(self, name: str, compared: int) -> None:
        self.levels[name] = Level(verdict=Outcome.PASS, compared=compared)

    def failed(self, name: str, compared: int, finding: Finding) -> None:
        self.levels[name] = Level(verdict=Outcome.FAIL, reason=finding.reason, compared=compared)
        self.finding = self.finding or finding


def judge_cycle(
    cycle: Cycle, uninterrupted: PartReport, resumed: PartReport
) -> tuple[Verdict, list[Measurement]]:
    """The verdict over both processes, and its measurements."""
    levels = _Levels()
    _judge_losses(levels, cycle, uninterrupted, resumed)
    _judge_updates(levels, cycle, uninterrupted)
    _judge_adapters(levels, cycle, uninterrupted, resumed)
    _judge_checkpoint(levels, cycle, uninterrupted, resumed)
    measurements = _judge_resume(levels, cycle, uninterrupted, resumed)
    missing = sorted(uninterrupted.at_checkpoint.keys() - resumed.at_checkpoint.keys())
    finding = levels.finding
    verdict = Verdict(
        verdict=outcome_of_levels(levels.levels),
        model={"name": cycle.model},
        reference={"run": "the uninterrupted run"},
        candidate={"run": cycle.run, "trainer": cycle.trainer or "reference"},
        levels=levels.levels,
        location=finding.location if finding else None,
        diagnosis=finding.diagnosis if finding else None,
        statistic="exact",
        resolution=0.0,
        compared=sum(level.compared for level in levels.levels.values()),
        unmatched=Unmatched(expected=missing),
    )
    return verdict, measurements


def _judge_losses(
    levels: _Levels, cycle: Cycle, uninterrupted: PartReport, resumed: PartReport
) -> None:
    # Not the norms: nan says that the trainer cannot observe it, and inf is a step that a loss
    # scaler left out.
    steps = [*uninterrupted.steps, *resumed.steps]
    bad = [step for step in steps if not math.isfinite(step.loss)]
    if bad:
        reason = f"loss {bad[0].loss}, gradient norm {bad[0].grad_norm} in step {bad[0].step}"
        location = Location(phase="forward", step=bad[0].step)
        levels.failed("loss", len(steps), Finding("non-finite", location, reason))
    elif len(uninterrupted.steps) != cycle.steps:
        reason = f"{len(uninterrupted.steps)} of {cycle.steps} steps were made"
        levels.levels["loss"] = Level(verdict=Outcome.NOT_COMPARED, reason=reason)
    else:
        levels.passed("loss", len(steps))


def _judge_updates(levels: _Levels, cycle: Cycle, report: PartReport) -> None:
    """What is trainable moved, and nothing else did."""
    trainable = set(report.trainable)
    moved = _differences(report.at_start, report.at_end)
    still = sorted(trainable - moved)
    unexpectedly_trained = sorted(moved - trainable)
    compared = len(report.at_start)
    if still or not trainable:
        reason = f"{len(still)} of {len(trainable)} trainable tensors never moved: {_some(still)}"
        reason = reason if trainable else "nothing is trainable"
        location = _at("optimizer", cycle.steps, still)
        levels.failed("updates", compared, Finding("frozen-parameters", location, reason))
    elif unexpectedly_trained:
        reason = f"{len(unexpectedly_trained)} frozen tensors moved: {_some(unexpectedly_trained)}"
        location = _at("optimizer", cycle.steps, unexpectedly_trained)
        levels.failed("updates", compared, Finding("optimizer-update", location, reason))
    else:
        levels.passed("updates", compared)


def _judge_adapters(
    levels: _Levels, cycle: Cycle, uninterrupted: PartReport, resumed: PartReport
) -> None:
    """The adapter's file holds what the model holds, at the checkpoint and at the end."""
    if "lora" not in cycle.features:
        levels.levels["adapter"] = Level(verdict=None, reason="no adapter is trained")
        return
    compared = 0
    for step, report in ((cycle.resume_at, uninterrupted), (cycle.steps, resumed)):
        if report is resumed and resumed.problem and not resumed.adapter_in_memory:
            continue  # it never came to save; the level "checkpoint" says why
        wrong = sorted(_differences(report.adapter_in_memory, report.adapter_on_disk))
        compared += len(report.adapter_in_memory)
        if wrong or not report.adapter_in_memory:
            reason = report.problem or (
                f"{len(wrong)} of {len(report.adapter_in_memory)} adapter tensors are not in the"
                f" file as they are in the model: {_some(wrong)}"
            )
            location = _at("checkpoint", step, wrong)
            levels.failed("adapter", compared, Finding("adapter-mismatch", location, reason))
            return
    levels.passed("adapter", compared)


def _judge_checkpoint(
    levels: _Levels, cycle: Cycle, uninterrupted: PartReport, resumed: PartReport
) -> None:
    """The state after loading is the state that was saved."""
    if resumed.problem and not resumed.at_checkpoint:
        location = Location(phase="checkpoint", step=cycle.resume_at)
        finding = Finding("checkpoint-mismatch", location, resumed.problem)
        levels.failed("checkpoint", 0, finding)
        return
    wrong = sorted(_differences(uninterrupted.at_checkpoint, resumed.at_checkpoint))
    compared = len(uninterrupted.at_checkpoint)
    if not compared:
        reason = "the trainer has no state"
        levels.levels["checkpoint"] = Level(verdict=Outcome.NOT_COMPARED, reason=reason)
    elif wrong:
        only_generators = all(path.startswith("generators.") for path in wrong)
        diagnosis: Diagnosis = "rng-state" if only_generators else "checkpoint-mismatch"
        reason = f"{len(wrong)} of {compared} values are not as they were saved: {_some(wrong)}"
        location = _at("checkpoint", cycle.resume_at, wrong)
        levels.failed("checkpoint", compared, Finding(diagnosis, location, reason))
    else:
        levels.passed("checkpoint", compared)


def _judge_resume(
    levels: _Levels, cycle: Cycle, uninterrupted: PartReport, resumed: PartReport
) -> list[Measurement]:
    """Steps and final parameters are those of the uninterrupted run."""
    if not resumed.steps:
        reason = "the resumed run made no step"
        levels.levels["resume"] = Level(verdict=None, reason=reason)
        return []
    expected = uninterrupted.steps[cycle.resume_at :]
    rows = [
        row
        for one, other in zip(resumed.steps, expected, strict=False)
        for row in _step_rows(one, other)
    ]
    parameters = sorted(_differences(uninterrupted.at_end, resumed.at_end))
    compared = len(rows) + len(uninterrupted.at_end)
    wrong = [row for row in rows if not row.ratio <= 0]
    if [step.step for step in resumed.steps] != [step.step for step in expected]:
        reason = f"{len(resumed.steps)} steps were made instead of {len(expected)}"
        location = Location(phase="checkpoint", step=cycle.resume_at)
        levels.failed("resume", compared, Finding("checkpoint-mismatch", location, reason))
    elif wrong:
        reason = f"the {wrong[0].port} of step {wrong[0].step} is not the uninterrupted run's"
        # Equal parameters and an equal batch give another loss only by other random numbers.
        first_loss = wrong[0].port == "loss" and wrong[0].step == cycle.resume_at
        drawn = first_loss and levels.levels["checkpoint"].verdict is Outcome.PASS
        diagnosis: Diagnosis = "rng-state" if drawn else "checkpoint-mismatch"
        location = Location(phase="checkpoint", step=wrong[0].step)
        levels.failed("resume", compared, Finding(diagnosis, location, reason))
    elif parameters:
        reason = f"{len(parameters)} parameters end elsewhere: {_some(parameters)}"
        location = _at("checkpoint", cycle.steps, parameters)
        levels.failed("resume", compared, Finding("checkpoint-mismatch", location, reason))
    else:
        levels.passed("resume", compared)
    return rows


def _step_rows(actual: StepRecord, expected: StepRecord) -> list[Measurement]:
    pairs = {
        "number of tokens": (float(actual.num_tokens), float(expected.num_tokens)),
        "loss": (actual.loss, expected.loss),
    }
    norms = actual.grad_norm, expected.grad_norm
    if not all(math.isnan(norm) for norm in norms):
        pairs["gradient norm"] = norms
    return [
        Measurement(
            level="resume",
            module="",
            port=port,
            phase="checkpoint",
            step=expected.step,
            statistic="exact",
            actual=0.0 if one == other else abs(one - other),
            expected=0.0,
            ratio=0.0 if one == other else math.inf,
            limit=0.0,
        )
        for port, (one, other) in pairs.items()
    ]


def _differences(expected: Fingerprint, actual: Fingerprint) -> set[str]:
    """Paths that only one side has, or that differ."""
    paths = expected.keys() | actual.keys()
    return {path for path in paths if expected.get(path) != actual.get(path)}


def _at(phase: Phase, step: int, paths: list[str]) -> Location:
    """The place of the first of `paths`, where there is one."""
    return Location(phase=phase, step=step, parameter=_shown(paths[0]) if paths else None)


def _some(paths: list[str]) -> str:
    return name_some([_shown(path) for path in paths])


def _shown(path: str) -> str:
    """The path of a parameter as the Hugging Face model has it; of other values as it is."""
    part, _, name = path.partition(".")
    return unwrapped_path(name) if part == "model" else path
