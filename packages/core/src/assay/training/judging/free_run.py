"""Judges the free run: losses, end, checkpoint, replicas, dropout masks, and kept precision."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from assay.dtypes import FORMATS, float_format
from assay.errors import name_some
from assay.judge.levels import DiagnosedFault, LevelResult, failed, not_run, passed
from assay.judge.replays import Judged
from assay.judge.results import PortResult
from assay.judge.wording import format_number
from assay.noise import TENSOR_FLOOR
from assay.sites import Phase
from assay.stages import Stage
from assay.statistics import worst_error
from assay.training.judging.evidence import FreeEvidence, TrainEvidence, location_of_parameter
from assay.training.protocol import PHASE_METHODS
from assay.training.reports import (
    MOST_IN_ANY_ORDER,
    FreeRun,
    HeldPart,
    LossCurve,
    StateValue,
    TrainerReport,
)
from assay.verdicts import Diagnosis, Level, Location, Measurement, Outcome, Ratio

# In 16 bits the noise of a few losses is never small by chance, as it is at least half a unit: a fourth
# of the limit, 5, is over twice the largest ratio of 484 clean runs, 1.91 (training.toml). Of 474 in
# float32 three are over 5, and one is at 12.2.
_OF_NARROW = 0.25

# Ports of the parameters at the end of the free run and of the resumed run.
TRAJECTORY, RESUMED_TRAJECTORY = "trajectory", "resumed-trajectory"


def judge_losses(evidence: FreeEvidence) -> tuple[Judged | None, list[str]]:
    """Judge the losses of the free run against the yardstick's, and return notes on them.

    The allowed error is that of the noise run's losses times the weight drift. Errors are root mean
    squares over the steps, because there are only a few losses.
    """
    expected = evidence.reference.yardstick.losses
    actual = [step.loss for step in evidence.report.free.steps]
    noise = evidence.reference.noise.losses
    if _draws_on_ranks(evidence):
        note = (
            "losses of the free run are not compared: each rank draws the numbers of its own"
            " dropout; those of single micro-batches are"
        )
        return None, [note]
    if not all(map(math.isfinite, noise)):
        return None, [f"losses are not compared: the noise run itself has {noise}"]
    error = relative_error_of_losses(actual, expected)
    floor = TENSOR_FLOOR * evidence.unit_roundoff
    allowed = max(relative_error_of_losses(noise, expected), floor) * _weight_drift(evidence)
    ratio = Ratio("loss-error", error, allowed)
    port = PortResult("", "free-run", Stage("", "forward"), 0, evidence.dtype, "")
    delta = worst_error(abs(a - e) for a, e in zip(actual, expected, strict=True))
    noise_delta = worst_error(abs(a - e) for a, e in zip(noise, expected, strict=True))
    note = (
        f"largest difference of a loss over {len(actual)} free steps: {format_number(delta, 2)} nats"
        f" (noise run: {format_number(noise_delta, 2)})"
    )
    notes = [note, *_report_differences(evidence)]
    limit = evidence.limits.of("loss-error")
    if float_format(evidence.dtype).is_narrow:
        limit *= _OF_NARROW
    return Judged.of(ratio, limit, port), notes


def _report_differences(evidence: FreeEvidence) -> list[str]:
    """Note differences in the trainer's reports that do not affect training."""
    notes = []
    counted = [step.num_tokens for step in evidence.report.free.steps]
    expected = evidence.reference.num_tokens
    if counted != expected:
        notes.append(
            f"the trainer counts {counted} label tokens in its steps, the reference {expected}"
        )
    still = sorted(
        {step.step for one in evidence.reports for step in one.free.steps if not step.updated}
    )
    if still:
        notes.append(
            f"steps of the free run that changed no parameter: {', '.join(map(str, still))}, as one"
            " that is skipped for its loss scale does; of their updates nothing was compared there"
        )
    losses = [[step.loss for step in report.free.steps] for report in evidence.reports]
    others = [rank for rank, own in enumerate(losses) if not all(map(_same, own, losses[0]))]
    if others:
        notes.append(
            f"rank {others[0]} reports the losses {losses[others[0]]}, rank 0 {losses[0]}: those of"
            " rank 0 are judged"
        )
    return notes


def judge_trajectory(evidence: FreeEvidence) -> list[Judged]:
    """Judge where the free run and the resumed run take each parameter, against the recorded steps.

    This covers what no replayed step shows: the last update, and effects that build up over steps.
    """
    if _draws_on_ranks(evidence):
        return []
    noise = {row.parameter: row for row in evidence.reference.noise_trajectory}
    limit, options = evidence.limits.of("trajectory-error"), evidence.options
    # Adam moves an element by the learning rate, which bounds the drift by the declared rounding.
    drift = evidence.report.traits.update_rounding * options.learning_rate * options.steps
    judged = []
    for rank, report in enumerate(evidence.reports):
        runs = {
            TRAJECTORY: report.free.trajectory,
            RESUMED_TRAJECTORY: report.free.resumed_trajectory,
        }
        for name, row in ((name, row) for name, rows in runs.items() for row in rows):
            module, _, short = row.parameter.rpartition(".")
            floor = TENSOR_FLOOR * evidence.unit_roundoff * row.size
            expected = max(noise[row.parameter].error, floor)
            if not math.isfinite(expected):
                continue
            stage = Stage(module, "optimizer")
            port = PortResult(module, f"{name}.{short}", stage, 0, evidence.dtype, "")
            port.rank = rank
            # Adds to the allowed error without being multiplied by the limit: its bound is known.
            expected += drift / limit
            judged.append(Judged.of(Ratio("trajectory-error", row.error, expected), limit, port))
    return judged


def _draws_on_ranks(evidence: FreeEvidence) -> bool:
    return evidence.reference.draws and evidence.on_ranks


def _weight_drift(evidence: FreeEvidence) -> float:
    """Return the error of the final weights relative to the noise run's, at least 1.

    To first order the error of a loss is proportional to it. Adam moves a weight by the learning rate
    even if its gradient is mostly rounding, so the drift differs between correct runs. Return 1 if
    the weights are over their limit.
    """
    judged = judge_trajectory(evidence)
    if any(item.failed for item in judged):
        return 1.0
    return max((1.0, *(item.value for item in judged)))


def notes_on_rounding(evidence: FreeEvidence) -> list[str]:
    """Note the declared rounding of the optimizer, below which errors of updates are not seen."""
    rounding = evidence.report.traits.update_rounding
    if not rounding:
        return []
    told = (
        f"the trainer declares that its optimizer rounds whole updates by {rounding:.1e}, relative:"
    )
    return [f"{told} smaller errors of updates and moments are not seen"]


def trajectory_gap(evidence: FreeEvidence) -> str | None:
    """Explain why the end of some parameter cannot be judged; None if all can."""
    if _draws_on_ranks(evidence):
        return None
    expected = {row.parameter: row.error for row in evidence.reference.noise_trajectory}
    if broken := sorted(name for name, error in expected.items() if not math.isfinite(error)):
        return f"the noise run itself does not end at a finite {name_some(broken)}"
    shown = {row.parameter for report in evidence.reports for row in report.free.trajectory}
    if missing := sorted(expected.keys() - shown):
        return f"not seen after the last step: {name_some(missing)}"
    return None


def relative_error_of_losses(actual: list[float], expected: list[float]) -> float:
    """Return the root mean square of the relative errors of the losses."""
    squares = [((a - e) / e) ** 2 for a, e in zip(actual, expected, strict=True)]
    return math.sqrt(sum(squares) / len(squares))


def rows_of_free_run(evidence: FreeEvidence) -> list[Measurement]:
    """Return the curves of the free run, which resumed at a step, and of the noise run."""
    free = evidence.report.free
    resumed = LossCurve.of(free.resumed, evidence.options.resume_at)
    curves = {"candidate": LossCurve.of(free.steps), "noise": evidence.reference.noise}
    return rows_of_curves(curves | {"resumed": resumed}, evidence.reference.yardstick)


def rows_of_curves(curves: Mapping[str, LossCurve], yardstick: LossCurve) -> list[Measurement]:
    """Return loss and gradient norm of each step with the yardstick's, by side, for display only."""
    phases: dict[str, Phase] = {"loss": "forward", "gradients": "clip"}
    return [
        Measurement(
            level=level, module="", port=port, phase=phases[level], step=step,
            statistic=f"{side}-{port}", actual=value, expected=expected[step], ratio=math.nan,
        )
        for side, curve in curves.items()
        for level, port, actual, expected in (
            ("loss", "loss", curve.losses, yardstick.losses),
            ("gradients", "grad-norm", curve.observed_norms, yardstick.grad_norms),
        )
        for step, value in enumerate(actual, curve.first_step)
    ]  # fmt: skip


def judge_checkpoint(evidence: FreeEvidence) -> LevelResult:
    """Judge bitwise the saved files, the restored state, and the resumed run."""
    free = evidence.report.free
    inexact = _why_inexact(evidence)
    rows = [
        row
        for rank, report in enumerate(evidence.reports)
        for row in _resumed_rows(evidence, rank, report.free)
    ]
    if inexact is not None:
        # Values differ from the first reduction or update on, which comes after the first loss.
        first = (evidence.options.resume_at, "loss")
        rows = [row for row in rows if (row.step, row.port) == first]
    problems = list(_find_problems(evidence, rows, is_exact=inexact is None))
    compared = free.saved_compared + free.compared + len({(row.step, row.port) for row in rows})
    if problems:
        outcome, reason = Outcome.FAIL, problems[0].reason
    elif not compared or not rows:
        outcome, reason = Outcome.NOT_COMPARED, "the run was not resumed"
    elif not free.saved_compared:
        outcome, reason = Outcome.NOT_COMPARED, "the checkpoint has no model that users could load"
    else:
        outcome, reason = Outcome.PASS, None
    level = Level(verdict=outcome, compared=compared, reason=reason)
    notes = [*free.notes, *(problem.reason for problem in problems[1:] if problem.reason)]
    if inexact is not None:
        by = "not compared" if evidence.reference.draws else "judged by its noise"
        notes.append(
            f"{inexact}: of the resumed run the first loss is compared bitwise, what follows is {by}"
        )
    return LevelResult(level, rows, notes, cause=problems[0] if problems else None)


def _find_problems(
    evidence: FreeEvidence, rows: list[Measurement], *, is_exact: bool
) -> Iterator[DiagnosedFault]:
    free = evidence.report.free
    if free.problem is not None:
        yield _mismatch(evidence, free.problem)
    yield from _wrong_state(evidence, free.changed_by_saving, "after saving")
    if free.saved:
        reason = (
            f"{len(free.saved)} of {free.saved_compared} tensors in the model folder are not what"
            f" the model held: {name_some(free.saved)}"
        )
        yield _mismatch(evidence, reason, free.saved[0])
    if free.settings:
        reason = "the model folder's configuration is not the model's"
        yield _mismatch(evidence, f"{reason}: {name_some(free.settings)}")
    yield from _wrong_state(evidence, free.not_restored, "after loading the checkpoint")
    yield from _wrong_state(evidence, evidence.report.replay.not_loaded, "after load_state_dict")
    yield from _different_step(evidence, rows)
    if free.ended_otherwise and is_exact:
        reason = (
            f"after the last step {len(free.ended_otherwise)} parameters and moments of the resumed"
            f" run are not the uninterrupted run's: {name_some(free.ended_otherwise)}"
        )
        yield _mismatch(evidence, reason)


def _why_inexact(evidence: FreeEvidence) -> str | None:
    """Explain why a resumed run may differ in its last bits; None if it must be bitwise equal."""
    declared = evidence.report.traits.inexact_resume
    if declared is None and len(evidence.reports) > MOST_IN_ANY_ORDER:
        return f"{len(evidence.reports)} ranks may add up in another order after a restart"
    return declared


def _location(evidence: FreeEvidence, name: str | None = None) -> Location:
    return location_of_parameter("checkpoint", name, evidence.options.resume_at)


def _mismatch(evidence: FreeEvidence, reason: str, name: str | None = None) -> DiagnosedFault:
    diagnosis: Diagnosis = "adapter-mismatch" if evidence.options.lora else "checkpoint-mismatch"
    return DiagnosedFault(diagnosis, _location(evidence, name), reason)


def _wrong_state(
    evidence: FreeEvidence, wrong: list[StateValue], when: str
) -> list[DiagnosedFault]:
    if not wrong:
        return []
    names = name_some([value.path for value in wrong])
    reason = f"{len(wrong)} values are not as they were {when}: {names}"
    if all(value.part == "generators" for value in wrong):
        return [DiagnosedFault("rng-state", _location(evidence), reason)]
    named = [value.parameter for value in wrong if value.parameter is not None]
    # With LoRA only the adapter changes from checkpoint to checkpoint.
    adapted = evidence.options.lora and named
    diagnosis: Diagnosis = "adapter-mismatch" if adapted else "checkpoint-mismatch"
    name = named[0] if named else None
    return [DiagnosedFault(diagnosis, _location(evidence, name), reason)]


def _different_step(evidence: FreeEvidence, rows: list[Measurement]) -> list[DiagnosedFault]:
    wrong = [row for row in rows if row.ratio > 0]
    if not wrong:
        return []
    first = wrong[0]
    reason = f"the {first.port} of step {first.step} is not the uninterrupted run's"
    free = evidence.report.free
    # With equal state and batch, the first loss differs only through random numbers or through values
    # outside of the state, such as the scale of an adapter.
    at_once = first.port == "loss" and first.step == evidence.options.resume_at
    drawn = at_once and not free.not_restored and not free.generators_compared
    location = Location(phase="checkpoint", step=first.step, rank=first.rank)
    finding = _mismatch(evidence, reason)
    diagnosis: Diagnosis = "rng-state" if drawn else finding.diagnosis
    return [DiagnosedFault(diagnosis, location, reason)]


def _resumed_rows(evidence: FreeEvidence, rank: int, free: FreeRun) -> list[Measurement]:
    """Compare a rank's report of each resumed step with the same step of the uninterrupted run."""
    rows: list[Measurement] = []
    if not free.resumed:
        return rows
    expected = free.steps[evidence.options.resume_at :]
    for one, other in zip(free.resumed, expected, strict=True):
        pairs = {"loss": (one.loss, other.loss), "gradient norm": (one.grad_norm, other.grad_norm)}
        rows += [
            Measurement(
                level="checkpoint",
                module="",
                port=port,
                phase="checkpoint",
                rank=rank,
                step=other.step,
                statistic="exact",
                actual=abs(actual - wanted),
                expected=0.0,
                ratio=0.0 if _same(actual, wanted) else math.inf,
                limit=0.0,
            )
            for port, (actual, wanted) in pairs.items()
        ]
    return rows


def _same(actual: float, expected: float) -> bool:
    return actual == expected or (math.isnan(actual) and math.isnan(expected))


def judge_replicas(evidence: FreeEvidence) -> LevelResult:
    """Judge if ranks that hold the same part of a value hold bitwise equal numbers."""
    if not evidence.on_ranks:
        return not_run("one process has no replicas")
    held = [report.free.held for report in evidence.reports]
    compared = 0
    for step in range(min(map(len, held))):
        at_step = [dict(rank[step]) for rank in held]
        copies = Counter(part for rank in at_step for part in rank)
        compared += sum(count > 1 for count in copies.values())
        diverged = _diverged(at_step)
        if diverged:
            names = sorted({part.parameter for part in diverged})
            reason = (
                f"after step {step} {len(names)} parameters or their moments differ between ranks"
                f" that hold the same part of them: {name_some(names)}"
            )
            part = min(diverged, key=str)
            location = Location(
                phase="optimizer",
                step=step,
                rank=diverged[part],
                module=part.parameter.rpartition(".")[0],
                parameter=part.parameter,
            )
            result = failed(compared, reason)
            result.cause = DiagnosedFault("replica-divergence", location)
            return result
    if not compared:
        return not_run("no rank holds what another one holds")
    return passed(compared)


def find_unshared(evidence: FreeEvidence) -> str | None:
    """Describe micro-batches that were not trained exactly once; None if all were."""
    if not evidence.on_ranks:
        return None
    options = evidence.options
    micro_batches_run: Counter[tuple[int, int]] = Counter()
    for coordinate, reports in _by_data_rank(evidence.reports).items():
        first = reports[0].replay
        for report in reports:
            if sorted(report.replay.micro_batches_run) != sorted(first.micro_batches_run):
                return f"ranks with dp={coordinate} train on different micro-batches"
        micro_batches_run.update(first.micro_batches_run)
    for step in range(options.steps):
        for number in range(options.micro_batches):
            count = micro_batches_run[step, number]
            if count != 1:
                how = "by no rank" if not count else f"{count} times"
                return f"micro-batch {number} of step {step} was trained {how}"
    return None


def find_wrong_masks(evidence: FreeEvidence) -> DiagnosedFault | None:
    """Find dropout masks that are drawn twice, or equal on ranks that declare different masks."""
    for rank, report in enumerate(evidence.reports):
        if len(set(report.free.masks)) < len(report.free.masks):
            reason = "two micro-batches drop by the same random numbers"
            return DiagnosedFault("rng-state", Location(phase="forward", rank=rank), reason)
    alike = _ranks_that_drop_alike(evidence)
    if alike is None or evidence.reports[0].traits.dropout_masks != "own":
        return None
    reason = f"{_drop_alike(alike)}, and the trainer declares that each draws its own"
    return DiagnosedFault("rng-state", Location(phase="forward", rank=alike[1].rank), reason)


def notes_on_masks(evidence: FreeEvidence) -> list[str]:
    """Note undeclared equal masks on ranks of dp, or that no mask was seen."""
    if evidence.reference.draws and not any(report.free.masks for report in evidence.reports):
        return ["masks of dropout are not compared: none is drawn by torch's own functions"]
    alike = _ranks_that_drop_alike(evidence)
    if alike is None or evidence.reports[0].traits.dropout_masks is not None:
        return []
    declare = 'TrainerTraits(dropout_masks="shared"), else "own", which makes it a failure'
    return [f"{_drop_alike(alike)}: where this is meant, declare {declare}"]


class _DataRank(NamedTuple):
    """A rank and its place on the axis dp."""

    rank: int
    place: int


def _ranks_that_drop_alike(evidence: FreeEvidence) -> tuple[_DataRank, _DataRank] | None:
    """Find the first two ranks of different places on dp with a mask in common."""
    first: dict[str, _DataRank] = {}
    for rank, report in enumerate(evidence.reports):
        own = _DataRank(rank, report.coordinates.get("dp", 0))
        for mask in report.free.masks:
            if first.setdefault(mask, own).place != own.place:
                return first[mask], own
    return None


def _drop_alike(ranks: tuple[_DataRank, _DataRank]) -> str:
    return f"dp={ranks[0].place} and dp={ranks[1].place} drop by the same random numbers"


def _by_data_rank(reports: Sequence[TrainerReport]) -> dict[int, list[TrainerReport]]:
    """Group the ranks that train on the same micro-batches, by their place on the axis dp."""
    groups: dict[int, list[TrainerReport]] = {}
    for report in reports:
        groups.setdefault(report.coordinates.get("dp", 0), []).append(report)
    return groups


def _diverged(ranks: Sequence[Mapping[HeldPart, str]]) -> dict[HeldPart, int]:
    """Return parts whose hash differs from the first rank's, each with a rank where it differs."""
    first: dict[HeldPart, str] = {}
    wrong: dict[HeldPart, int] = {}
    for number, rank in enumerate(ranks):
        for part, digest in rank.items():
            if first.setdefault(part, digest) != digest:
                wrong.setdefault(part, number)
    return wrong


# A sum of n numbers in float32 has an error of at most n - 1 roundings of its terms (Higham, Accuracy
# and Stability of Numerical Algorithms, 4.2), and so has the sum that it is compared with. As much
# again allows ranks to add in another order. In bfloat16 the error is 2**15 times as large.
_ROUNDINGS_OF_A_SUM = 4

# A larger error means that the sum lacks a part. The phase `backward` judges that.
_LARGEST_ROUNDING = 0.01


def find_broken_promise(evidence: TrainEvidence) -> DiagnosedFault | None:
    """Find values that a run under mixed precision keeps in less than float32."""
    kept = evidence.report.free.kept
    if kept is None:
        return None
    dtype, promise = evidence.dtype, "float32, which mixed precision promises"
    is_whole = len(kept.parameters) == evidence.reference.num_trainable
    unmoved = _describe_unmoved(evidence)
    for names, words in (
        (kept.parameters, f"trained parameters are kept in {dtype} without a copy in {promise}: {unmoved}"),
        (kept.moments, f"moments are kept in less than {promise}"),
        (kept.rounded, f"parameters in float32 are rounded to {dtype} between two steps"),
    ):  # fmt: skip
        if names:
            # The name of a moment follows that of its parameter.
            parameter = None if is_whole and names is kept.parameters else names[0].split(" ")[0]
            reason = f"{len(names)} {words}: {name_some(names)}"
            location = location_of_parameter("optimizer", parameter)
            return DiagnosedFault("optimizer-update", location, reason)
    return _find_rounded_sums(evidence)


def is_explained_by(phase: Phase, promise: DiagnosedFault) -> bool:
    """Return True if the first error, in `phase`, follows from a broken promise."""
    order = list(PHASE_METHODS)
    if phase not in order:
        return False
    of_promise = promise.location.phase
    return order.index(phase) > order.index(of_promise) or phase == of_promise == "optimizer"


def _find_rounded_sums(evidence: TrainEvidence) -> DiagnosedFault | None:
    gradients, micro_batches = evidence.report.gradients, evidence.options.micro_batches
    limit = _ROUNDINGS_OF_A_SUM * micro_batches * FORMATS["float32"].unit_roundoff
    errors = gradients.errors_of_sums
    rounded = sorted(n for n, error in errors.items() if limit < error <= _LARGEST_ROUNDING)
    # A float32 sum of several narrow values fits the narrow dtype only by chance; not all sums do.
    all_narrow = gradients.sharded_gradients == gradients.narrow_gradients > 0
    if not rounded and not (all_narrow and micro_batches > 1):
        return None
    names = f": {name_some(rounded)}" if rounded else ""
    reason = (
        f"gradients are added up in {evidence.dtype}, which mixed precision does in float32{names}"
    )
    whole = not rounded or len(rounded) == len(errors)
    location = location_of_parameter("backward", None if whole else rounded[0])
    return DiagnosedFault("module-error", location, reason)


def _describe_unmoved(evidence: TrainEvidence) -> str:
    moved = evidence.report.model.moved
    share = 100 * (moved.num_expected - moved.num_moved) / max(moved.num_expected, 1)
    return f"updates leave {share:.1f}% of the weights where they are that the reference's move"
