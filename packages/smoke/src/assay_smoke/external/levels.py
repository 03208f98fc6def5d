"""Runs a training library uninterrupted, resumed and interrupted, and judges it level by level."""

import fnmatch
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

from assay.devices.registry import open_device
from assay.errors import name_some
from assay.judge.levels import (
    EXACT_NUMBERS,
    DecidingNumbers,
    LevelResult,
    failed,
    not_compared,
    not_run,
    passed,
    rows_of,
)
from assay.judge.wording import LEVEL_QUESTIONS
from assay.models.sources import local_folder, resolve_model
from assay.progress import format_size
from assay.runs import Progress
from assay.verdicts import Location, Outcome, Verdict
from assay_smoke.external.library import ExternalLibrary
from assay_smoke.external.rerun_levels import (
    judge_equivalent,
    judge_interruption,
    judge_resumption,
    unit_in_log,
)
from assay_smoke.external.runs import (
    Cycle,
    SavedModel,
    checkpoints_of,
    is_complete,
    read_history,
    rows_of_logs,
)
from assay_smoke.external.watched_run import Run, require_runnable
from assay_smoke.judging import failed_checkpoint, failed_update, find_wrong_movement, write_verdict
from assay_smoke.machine import FULL_DISK, MemoryUse

# Half a unit of the fourth significant digit. Libraries, such as transformers, log at least four.
_LOGGED_RATE = 5e-4

# Memory that a driver may keep after the processes have ended.
_DEVICE_SLACK_BYTES = 64 << 20

# Less than a driver's context with its kernels takes. Other processes of the machine may change by less.
_LEAST_DEVICE_BYTES = 16 << 20

# Zero at the start of every adapter, so that an untrained adapter changes nothing.
_STARTS_AT_ZERO = "lora_B"

# Losses with fewer digits may be equal by rounding if all steps have the same rows.
_PRECISE = 1e-5


def judge_runs(cycle: Cycle) -> LevelResult:
    """Judge that runs from the start made all steps in time."""
    from_start = [run for run in cycle.runs if run.name in ("uninterrupted", "repeated")]
    for run in from_start:
        reason = run.describe_bad_end()
        if reason and not run.made_all_steps:
            at = Location(phase="checkpoint", step=run.steps_made)
            place = at if reason.startswith(FULL_DISK) else None
            return failed(len(from_start), reason, location=place)
    return passed(len(from_start), seconds={run.name: run.seconds for run in cycle.runs})


def judge_ends(cycle: Cycle) -> LevelResult:
    """Judge that runs ended well after their last step."""
    runs = [run for run in cycle.runs if run.made_all_steps]
    for run in runs:
        if reason := run.describe_bad_end():
            is_distributed = cycle.library.ranks > 1 and "terminate called" in reason
            hint = "; does every rank call destroy_process_group at its end?"
            return failed(len(runs), reason + hint * is_distributed)
    return passed(len(runs)) if runs else not_run("no run made all steps")


_EACH_RANK = "; of several ranks, let only one print, and log the mean loss"


def judge_losses(cycle: Cycle) -> LevelResult:
    """Judge that losses are finite, in order, and one per step."""
    compared = sum(len(run.losses) for run in cycle.runs)
    # A library may give its first step the number 0 or 1.
    from_zero = next((loss.step == 0 for loss in cycle.uninterrupted.losses), False)
    for run in cycle.runs:
        for number, loss in enumerate(run.values, run.first_step + 1):
            if not math.isfinite(loss):
                reason = f"the loss of step {number} of the {run.name} run is {loss}"
                at = Location(phase="forward", step=number)
                return failed(compared, reason, "non-finite", at)
        logged = [one.step for one in run.losses if one.step is not None]
        begin = run.first_step + (not from_zero)
        expected = range(begin, begin + len(run.losses))
        for actual, due in zip_longest(logged, expected) if logged else ():
            if actual != due:
                reason = f"the {run.name} run logs step {actual} where {due} is expected"
                return failed(compared, reason + _EACH_RANK * (run.library.ranks > 1))
        is_whole = run.sigterm_after is None and is_complete(run)
        if is_whole and len(run.losses) != run.steps_left:
            reason = f"the {run.name} run logs {len(run.losses)} losses for {run.steps_left} steps"
            return failed(compared, reason + _EACH_RANK * (run.library.ranks > 1))
    return passed(compared) if compared else not_run("no run logged a loss")


def judge_learning_rates(cycle: Cycle) -> LevelResult:
    """Judge that every step has the rate of the declared schedule, or that of the uninterrupted run."""
    declared = cycle.library.learning_rates
    logged = [one.learning_rate for one in cycle.uninterrupted.losses]
    expected: list[float | None] = logged if declared is None else [*declared]
    compared = 0
    for run in cycle.runs if declared else cycle.runs[1:]:
        pairs = zip(expected[run.first_step :], run.losses, strict=False)
        for step, (due, one) in enumerate(pairs, run.first_step + 1):
            rate = one.learning_rate
            if declared and rate is None:
                return not_compared(f"the {run.name} run logs no rate in step {step}")
            if due is None or rate is None:
                continue
            compared += 1
            if _is_rate(rate, due):
                continue
            where = "expected" if declared else "in the uninterrupted run"
            reason = f"the learning rate of step {step} of the {run.name} run is {rate:g}, {where} {due:g}"
            reason += _explain_rate(expected, run, step)
            if run.first_step:
                return failed_checkpoint(step, compared, reason, diagnosis="checkpoint-mismatch")
            at = Location(phase="optimizer", step=step)
            return failed(compared, reason, location=at)
    if not compared:
        lacking = (
            "no step was logged"
            if declared
            else "no two runs log a learning rate, and no `learning_rates` are given"
        )
        return not_run(lacking)
    return passed(compared)


def _explain_rate(expected: Sequence[float | None], run: Run, step: int) -> str:
    """Name the steps whose rates a run logs from `step` on, its first wrong one."""

    def has_rates_of(shift: int, begin: int) -> bool:
        logged = [one.learning_rate for one in run.losses[begin - 1 - run.first_step :]]
        pairs: list[Any] = [*zip(logged, expected[begin - 1 + shift :], strict=False)]
        are_alike = (None not in pair and _is_rate(*pair) for pair in pairs)
        return bool(pairs) and all(are_alike)

    if has_rates_of(0, step + 1):
        return ", and all later steps have their own rates"
    if not run.first_step:
        rate = run.losses[step - 1].learning_rate or 0.0
        step = next((n for n, one in enumerate(expected, 1) if one and _is_rate(rate, one)), 0)
        advance = f", and step {step} has that rate: the schedule must advance once per step"
        return advance if step else ""
    for shift, when in ((-1, "earlier"), (1, "later")):
        if step + shift > 1 and has_rates_of(shift, step):
            held = f"as if the checkpoint held the state of one step {when}"
            return f"; that is the rate of step {step + shift}, {held}"
    return " (a resume must restore the schedule, and the optimizer, which holds the rate)"


def _is_rate(actual: float, expected: float) -> bool:
    return abs(actual - expected) <= _LOGGED_RATE * abs(expected)


def judge_checkpoints(cycle: Cycle) -> LevelResult:
    """Judge that all expected checkpoints exist, whole, finite and distinct, and no others."""
    if not cycle.saved:
        return not_run("the uninterrupted run is not complete")
    compared = sum(len(one.hashes) for one in cycle.saved.values())
    for step, reason, facts in _find_wrong_checkpoints(cycle):
        return failed_checkpoint(step, compared, reason, **facts)
    return passed(compared, steps=list(cycle.saved), reason=cycle.narrowing or None)


def _find_wrong_checkpoints(cycle: Cycle) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield step, reason and cause of each wrong checkpoint. Step 0 stands for the model itself."""
    kept, saved, start = cycle.library.kept_steps, cycle.saved, cycle.start
    if missing := [step for step in kept if step not in saved]:
        found = f"expected {_steps(kept)}, found {_steps(saved)}"
        yield missing[0], f"the checkpoint of step {missing[0]} is absent: {found}", {}
    for step, one in saved.items():
        name = f"the checkpoint of step {step}"
        if one.problem is not None or not one.hashes:
            yield step, f"{name}: {one.problem or 'it holds no tensor'}", {}
        if one.not_finite:
            cause = {"diagnosis": "non-finite", "parameter": one.not_finite[0]}
            yield step, f"{name} is not finite: {name_some(one.not_finite)}", cause
        if emptied := start and sorted({*one.zero} - {*start.zero}):
            cause = {"diagnosis": "checkpoint-mismatch", "parameter": emptied[0]}
            yield step, f"{name} holds only zeros in {name_some(emptied)}", cause
    repeats = [pair for pair in pairwise(saved.values()) if pair[0].hashes == pair[1].hashes]
    for one, later in repeats:
        repeated = f"repeats the tensors of step {one.step}"
        yield later.step, f"the checkpoint of step {later.step} {repeated}", {}
    if too_many := [step for step in saved if step not in kept]:
        reason = f"there is an unexpected checkpoint of step {too_many[0]}"
        if set(too_many) <= set(cycle.library.saved_steps):
            held = f"{len(saved)} checkpoints are kept instead of {len(kept)}"
            reason = f"{held}: step {too_many[0]} still has one"
        yield too_many[0], reason, {}
    if cycle.changed_files:
        yield 0, f"files in the folder of {{model}} changed: {name_some(cycle.changed_files)}", {}


def judge_updates(cycle: Cycle) -> LevelResult:
    """Judge that trainable parameters changed and frozen ones did not."""
    last = cycle.last
    if last is None or not last.hashes:
        return not_run("the last checkpoint is absent or incomplete", unchecked=True)
    is_adapter = cycle.library.checkpoints.kind == "adapter"
    zero = [name for name in last.zero if is_adapter and _STARTS_AT_ZERO in name]
    if reason := _find_nothing_learned(cycle, zero):
        at = Location(phase="backward", step=cycle.library.steps)
        return failed(len(last.hashes), reason, "frozen-parameters", at)
    if zero:
        total = sum(_STARTS_AT_ZERO in name for name in last.hashes)
        words = f"of {total} {_STARTS_AT_ZERO} are zero: they do not train, or are not saved"
        return failed_update(len(last.hashes), zero, words, "adapter-mismatch", step=last.step)
    frozen = {one for glob in cycle.library.frozen for one in fnmatch.filter(last.hashes, glob)}
    start = min(cycle.saved.items())[1] if is_adapter else cycle.start or SavedModel(0)
    if not is_adapter and (other := sorted(last.hashes.keys() ^ start.hashes.keys())):
        reason = f"parameters differ from the model's: {name_some(other)}"
        return failed(len(last.hashes), reason, "weight-mismatch")
    trained = last.hashes.keys() - frozen
    what = "tensors of the adapter" if is_adapter else "tensors outside of `frozen`"
    found = find_wrong_movement(
        start.hashes,
        last.hashes,
        (trained, f"of {len(trained)} {what}"),
        (frozen, f"of {len(frozen)} frozen tensors"),
        lambda _: {"step": last.step},
    )
    return found or passed(len(last.hashes), frozen=len(frozen))


def _find_nothing_learned(cycle: Cycle, zero: Sequence[str]) -> str | None:
    """Describe equal losses, or weights that only shrink although no `lora_B` is `zero`; or return None."""
    losses = cycle.uninterrupted.values
    value, num_equal = Counter(losses).most_common(1)[0] if losses else (0.0, 0)
    is_exact = value == 0 or unit_in_log(value, losses) <= _PRECISE * abs(value)
    if is_exact and 2 * num_equal > len(losses) > 1:
        return (
            f"the loss of {num_equal} of {len(losses)} steps is {value:g} in all logged digits: it does"
            " not depend on the model and the batch. Does any label remain in them?"
        )
    shrunk = [step for step, one in cycle.saved.items() if one.only_shrunk]
    if zero or not shrunk:
        return None
    before = max((step for step in cycle.saved if step < shrunk[0]), default=0)
    return (
        f"from step {before} to step {shrunk[0]}, no element of any tensor grew: weight decay alone"
        " moves them, and all gradients are zero"
    )


def judge_first_save(cycle: Cycle, resumed: LevelResult | None = None) -> LevelResult:
    """Judge that a checkpoint holds the step after which it is saved, not the one before.

    resumed: the level resume. If its first loss differs, as by an old model, any logged rate counts.

    A resumed run does not show an old model if its state has weights of its own. So a short run saves
    after each of two steps: if models are one step old, its first checkpoint holds the initial one.
    """
    library, line = cycle.library, " ".join(cycle.library.launch)
    unchecked = "it was not checked whether saved models are one step old"
    if "{steps}" not in line or "{save_every}" not in line:
        why = "the launch line has no {steps} and {save_every} for a run that saves after each step"
        return not_run(f"{why}: {unchecked}", unchecked=True)
    short = library.model_copy(update={"steps": 2, "save_every": 1, "keep": None})
    run = cycle.run("first-save", library=short)
    found = checkpoints_of(run)
    if not is_complete(run) or not {1, 2} <= found.keys():
        bad_end = run.describe_bad_end()
        problem = bad_end or "it wrote no checkpoints of steps 1 and 2"
        reason = f"the run with {{steps}} = 2: {problem}; {unchecked}"
        return not_compared(reason) if bad_end else not_run(reason, unchecked=True)
    logged = [-1.0 if one.learning_rate is None else one.learning_rate for one in run.losses]
    first, second = [*logged, -1.0, -1.0][:2]
    step = 2 if first == 0 else 1  # a warmup may begin at zero
    (saved,) = read_history(run, {step: found[step]})
    if not _is_initial(saved, cycle):
        return passed(len(saved.hashes))
    held = f"the checkpoint of step {step} holds the initial model"
    if library.precision == "float16":
        return not_run(f"{held}, as a loss scale may skip steps: {unchecked}", unchecked=True)
    # Some libraries log the rate of the next step, so that a rising one may have been zero.
    is_sure = library.learning_rates or first == 0 < second or first > second > 0
    is_other = resumed is not None and resumed.cause is not None and not resumed.cause.diagnosis
    rate = (library.learning_rates or (first, second))[step - 1]
    wanted = ["`precision`"] * (library.precision is None)
    if not (rate > 0 and (is_sure or is_other)):
        wanted.append(f"a positive rate of step {step} in `learning_rates`")
    if wanted:
        return not_compared(
            f"{held}: saved models are one step old, or that step changed nothing, as with a rate of 0 or if a"
            f" loss scale skips it. Missing: {' and '.join(wanted)}"
        )
    old = f"although its learning rate is {rate:g}: saved models are one step old"
    old += ", unless the log shows the rate of the next step" * (not is_sure)
    return failed_checkpoint(step, len(saved.hashes), f"{held}, {old}")


def _is_initial(saved: SavedModel, cycle: Cycle) -> bool:
    """Return True if a checkpoint holds what training began with."""
    if cycle.start is not None:
        return bool(saved.hashes) and saved.hashes == cycle.start.hashes
    begin = {name for name in saved.hashes if _STARTS_AT_ZERO in name}
    return bool(begin) and begin <= set(saved.zero)


def _steps(steps: Iterable[int]) -> str:
    return f"steps {', '.join(map(str, steps))}"


def judge_leftovers(cycle: Cycle) -> LevelResult:
    """Judge that no run left anything on the machine."""
    runs = [run for run in cycle.runs if run.hung_in is None]
    for run in runs:
        if run.leftovers:
            things = "; ".join(map(str, run.leftovers))
            if any(one.kind == "temporary file" for one in run.leftovers):
                things += "; `leftovers_allowed` names files that may stay"
            return failed(len(runs), f"the {run.name} run left behind {things}")
    return passed(len(runs)) if runs else not_run("the run was ended while it hung")


def judge_memory(cycle: Cycle) -> LevelResult:
    """Judge that the runs used memory of the device, and released it. Host memory is only recorded."""
    runs, device, name = cycle.runs, cycle.uninterrupted.device, cycle.library.device
    uses = [(run.name, run.on_device) for run in runs if run.on_device is not None]
    for run, use in uses:
        if not use.is_back(_DEVICE_SLACK_BYTES):
            return failed(len(runs), f"device memory of the {run} run: {use}")
    host_peak = _peak(run.host for run in runs)
    if not uses:
        if device is None or device.name == "cpu":
            return not_run("the library trains on the host", host_peak_bytes=host_peak)
        if device.torch_device == "cpu":
            return not_compared(f"{name} exists only inside assay: a command does not train on it")
        return not_run(
            f"the driver reports no free memory: it was not checked whether the library trains on {name}",
            unchecked=True,
            host_peak_bytes=host_peak,
        )
    device_peak = _peak(use for _, use in uses)
    if device_peak < _LEAST_DEVICE_BYTES:
        used = format_size(device_peak)
        return failed(len(runs), f"the runs used {used} of {name}: the library trains elsewhere")
    return passed(len(uses), host_peak_bytes=host_peak, device_peak_bytes=device_peak)


def _peak(uses: Iterable[MemoryUse]) -> int:
    return max((use.peak_bytes - use.start_bytes for use in uses), default=0)


def _notes_on(cycle: Cycle, found: Mapping[str, LevelResult]) -> Iterator[str]:
    """Yield notes on unchecked levels, memory and nondeterminism."""
    for name, one in found.items():
        is_noted = one.level.verdict is Outcome.PASS or (one.level.model_extra or {}).get(
            "unchecked"
        )
        if is_noted and one.level.reason:
            yield f"{name}: {one.level.reason}"
    most = max(cycle.runs, key=lambda run: run.host.peak_bytes)
    yield f"host memory of the {most.name} run: {most.host}"
    for run in [run for run in cycle.runs if run.on_device is not None][:1]:
        yield f"device memory of the {run.name} run: {run.on_device}"
    if any(cycle.spreads.values()):
        yield "two uninterrupted runs of one seed differ: their difference limits that of resumed runs"
    yield describe_unjudged([cycle.library])


def describe_unjudged(libraries: Iterable[ExternalLibrary]) -> str:
    """Name what all runs of a command share, which comparing them cannot judge."""
    is_declared = all(library.learning_rates for library in libraries)
    schedule = "" if is_declared else "the schedule (without `learning_rates`), "
    return (
        "not judged: what all runs of the command share, such as the model's code, the loss, masked"
        f" labels, rows that every run drops, {schedule}the applied learning rate (at most the logged one"
        " was compared), clipping and the update rule; `assay smoke data` judges labels and (--sampler) rows,"
        " `assay check train` the rest"
    )


# The levels in the order of the verdict. The first that fails provides the cause.
_LEVELS: dict[str, Callable[[Cycle], LevelResult]] = {
    "run": judge_runs,
    "loss": judge_losses,
    "learning-rate": judge_learning_rates,
    "checkpoint": judge_checkpoints,
    "updates": judge_updates,
    "first-save": judge_first_save,
    "equivalent": judge_equivalent,
    "resume": judge_resumption,
    "sigterm": judge_interruption,
    "tear-down": judge_ends,
    "leftovers": judge_leftovers,
    "memory": judge_memory,
}
# The levels that make runs, in the order of the runs. The others judge all runs, so they come later.
_MAKE_RUNS = ("resume", "sigterm", "equivalent")
# It makes a run that only matters if no other level fails, except that an old model can fail a resumed run.
_LAST, _EXPLAINED = "first-save", "resume"
# It judges that run, too.
_END = "tear-down"


def run_external(
    toml: Path, folder: Path, progress: Progress, device_name: str | None = None
) -> Verdict:
    """Run the library that `toml` describes, and judge it.

    device_name: to train on, if not the file's.
    folder: an existing one. It gets a log and the output of every run, and verdict.json. After a
        PASS, the outputs with their checkpoints are removed.
    Raises: UsageError or MachineError, with nothing left running, for a file that does not describe
        a library, and for a library that contradicts its file.
    """
    library = require_runnable(toml, device_name)
    device = open_device(library.device)
    with local_folder(resolve_model(library.model), "refuse") as model:
        first = Run("uninterrupted", library, model, folder, toml.resolve().parent, device)
        cycle = Cycle(first, progress)
        cycle.begin()
        verdict = _judge(cycle, toml)
    for run in cycle.runs:
        run.write_timeline(folder)
    if verdict.verdict is Outcome.PASS:
        for run in cycle.runs:
            shutil.rmtree(run.output, ignore_errors=True)
    return verdict


def _judge(cycle: Cycle, toml: Path) -> Verdict:
    """Make the remaining runs, judge all levels and write the verdict."""
    order = (*_MAKE_RUNS, *(name for name in _LEVELS if name not in (*_MAKE_RUNS, _LAST, _END)))
    found = {name: _LEVELS[name](cycle) for name in order}
    decided = {name for name, one in found.items() if one.is_failed} - {_EXPLAINED}
    resume = found[_EXPLAINED]
    found[_LAST] = not_run("another level failed") if decided else judge_first_save(cycle, resume)
    resumed, old = resume.level, found[_LAST].level
    if resumed.verdict is Outcome.FAIL and not (decided or found[_LAST].is_failed) and old.reason:
        update = {"reason": f"{resumed.reason}; {_LAST}: {old.reason}"}
        found[_EXPLAINED].level = resumed.model_copy(update=update)
    found[_END] = judge_ends(cycle)
    found = {name: found[name] for name in _LEVELS}
    for name, one in found.items():
        one.level = one.level.model_copy(
            update={"question": LEVEL_QUESTIONS["assay smoke run"][name]}
        )
    first = next((one for one in found.values() if one.is_failed), None)
    # The numbers of a failure are those of its level; a rule without a ratio has none.
    ratios = [
        row
        for row in (rows_of(found) if first is None else first.measurements)
        if row.statistic != "exact" and (first is None or row.ratio > (row.limit or 1.0))
    ]
    worst = max(ratios, key=lambda row: row.ratio / (row.limit or 1.0), default=None)
    numbers: DecidingNumbers = EXACT_NUMBERS
    if worst is not None:
        numbers = {"statistic": worst.statistic, "noise_ratio": worst.ratio, "limit": worst.limit}
    return write_verdict(
        found,
        cycle.uninterrupted.folder,
        None if first is None else first.cause,
        rows_of_logs(cycle),
        model={"name": cycle.library.model},
        reference={"run": "the uninterrupted run"},
        candidate={
            "run": cycle.library.device,
            "trainer": f"command:{toml}",
            "case": cycle.library.name,
            "launch": cycle.library.launch,
        },
        notes=_notes_on(cycle, found),
        next_steps=((first and first.level.model_extra) or {}).get("next", []),
        **numbers,
    )
