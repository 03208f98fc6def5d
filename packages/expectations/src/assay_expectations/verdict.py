"""The verdict over the expectations of a machine. Imports no torch."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from assay.errors import assay_command, name_some
from assay.judge.coverage import (
    CoverageParts,
    describe_coverage,
    judge_coverage,
    list_gaps,
    notes_on_coverage,
)
from assay.judge.levels import (
    Cause,
    DecidingNumbers,
    LevelResult,
    conclude,
    deciding_numbers,
    failed,
    find_worst,
    level_of,
    not_compared,
    notes_of,
    pool_resolutions,
    rows_of,
)
from assay.judge.wording import describe_error, format_against, format_count, format_number
from assay.models.config_files import can_move_outputs
from assay.verdicts import (
    Coverage,
    Diagnosis,
    Location,
    Measurement,
    NextStep,
    Outcome,
    Unmatched,
    Verdict,
)
from assay_expectations.differences import machine_differences
from assay_expectations.explaining import (
    Answer,
    Explained,
    describe_environment,
    describe_other_rounding,
    describe_setup_effect,
    explain,
)
from assay_expectations.judging import (
    Judged,
    describe_form,
    describe_worst,
    is_within_limits,
    judge_by,
    tokens_of,
)
from assay_expectations.records import (
    AllSeen,
    BrokenExpectationError,
    Expectation,
    Machine,
    Observed,
    Seen,
    recapture_command,
    step_to_verify,
)

SHIPPED = Path(str(files("assay_expectations") / "shipped"))

# Where captures go that cannot replace the shipped files.
_OWN_FOLDER = "expectations"
# Level name if nothing was captured on this machine.
_NO_EXPECTATION = "expectations"
_OF_ONE_TOKEN = "logits-worst", "output-worst"
# More files of one kind would hide others.
_MAX_SHOWN = 3


def judge_seen(
    run: str,
    expectations: Sequence[Expectation],
    here: AllSeen,
    allow_unused: Sequence[str] = (),
    broken: Mapping[str, BrokenExpectationError] | None = None,
) -> tuple[Verdict, list[Measurement]]:
    """Return the verdict over the observations of all expectations, and its measurements.

    Expectations of other machines are excluded.
    allow_unused: GLOBs of modules, parameters and experts that may stay uncompared.
    broken: the error of each file that cannot be used.
    """
    results: dict[str, LevelResult] = {}
    elsewhere: dict[str, str] = {}
    coverages: list[Coverage] = []
    changes: dict[str, list[str]] = {}  # the names of expectations that share one
    for name, expectation, seen in zip(_names(here.seen), expectations, here.seen, strict=True):
        if expectation.key.machine != here.machine:
            elsewhere[name] = _describe_elsewhere(name, expectation.key.machine, here.machine)
            continue
        if changed := describe_environment(expectation, here):
            changes.setdefault(changed, []).append(name)
        results[name] = _judge_one(name, expectation, seen, here, run)
        level = results[name].level
        if unexplained := [one for one in seen.config if one not in (level.reason or "")]:
            changes.setdefault("; ".join(unexplained), []).append(name)
        if seen.usage is not None and seen.observed is not None and not seen.stale:
            parts = CoverageParts(seen.usage, seen.usage, allowed=allow_unused)
            coverages.append(judge_coverage(parts))
            _require_coverage(name, results[name], coverages[-1])
    results |= {
        file: not_compared(error.problem, next=error.next_steps)
        for file, error in (broken or {}).items()
    }
    others = _condense(elsewhere)
    if not results:
        steps = _steps_to_capture(expectations, here, run)
        results[_NO_EXPECTATION] = not_compared("; ".join(others), next=steps)
        others = []
    notes = [
        f"{name_some(names)}: changed since the capture: {one}" for one, names in changes.items()
    ]
    return combine(
        results,
        [*notes, *others],
        next_steps=_next_steps(results),
        model={"name": ", ".join(_names_of_judged(expectations, here, broken or {}))},
        reference={"run": "the captures"},
        candidate={"run": run}
        | {name: one for name in ("setup", "model") if (one := getattr(here, name))},
        coverage=coverages[0] if len(results) == len(coverages) == 1 else None,
        compared_unit="tokens",
        headline=_headline(results, here.machine.dtype),
    )


def _names_of_judged(
    expectations: Sequence[Expectation], here: AllSeen, broken: Collection[str]
) -> list[str]:
    """List the models with an expectation of this machine, and the broken files; or all models without any."""
    judged = {here.model_of(one) for one in expectations if one.key.machine == here.machine}
    return sorted(judged | {*broken} or {here.model_of(one) for one in expectations})


def _severity(result: LevelResult) -> float:
    """Return the severity of the worst ratio; without one 1, between runs over a limit and within it."""
    return find_worst(result.judged).severity if result.judged else 1.0


def _worst_first(results: Mapping[str, LevelResult], outcome: Outcome) -> list[str]:
    names = [name for name, one in results.items() if one.level.verdict is outcome]
    return sorted(names, key=lambda name: -_severity(results[name]))


def _next_steps(results: Mapping[str, LevelResult]) -> list[NextStep]:
    """Return the steps after each result that did not pass, failures first, the worst first."""
    names = _worst_first(results, Outcome.FAIL) + _worst_first(results, Outcome.NOT_COMPARED)
    steps = {
        name: found
        for name in names
        if (found := (results[name].level.model_extra or {}).get("next"))
    }
    if len(steps) <= 1:
        return [step for found in steps.values() for step in found]
    shown = [
        replace(step, purpose=f"{name}: {step.purpose or 'to go on'}")
        for name in [*steps][:_MAX_SHOWN]
        for step in steps[name]
    ]
    if (more := len(steps) - _MAX_SHOWN) > 0:
        shown.append(NextStep(f"{more} more files have their next steps in verdict.json"))
    return shown


def _headline(results: Mapping[str, LevelResult], dtype: str) -> str | None:
    """Name what failed, the worst first, or state the largest error of a PASS."""
    for outcome, usual, verb in (
        (Outcome.FAIL, "differs from the captured outputs", "failed"),
        (Outcome.NOT_COMPARED, "was not compared", "were not compared"),
    ):
        names = _worst_first(results, outcome)
        if names == [_NO_EXPECTATION]:
            return "Nothing was captured for this device and dtype."
        parts = [
            f"{name} {(results[name].level.model_extra or {}).get('summary') or usual}"
            for name in names
        ]
        if len(parts) == 1:
            return parts[0]
        if (more := len(parts) - _MAX_SHOWN) > 0:
            parts[_MAX_SHOWN:] = [f"and {more} more"]
        if parts:
            return f"{len(names)} of {len(results)} expectations {verb}: {'; '.join(parts)}"
    return _describe_pass(results, dtype)


def _describe_pass(results: Mapping[str, LevelResult], dtype: str) -> str:
    """State the largest error of results that all passed, relative to its limit."""
    name, worst = max(
        ((name, find_worst(one.judged)) for name, one in results.items()),
        key=lambda one: one[1].severity,
    )
    num_tokens = sum(one.level.compared for one in results.values())
    whose, where = "The outputs agree with the capture", ""
    if len(results) > 1:
        whose, where = f"All {len(results)} expectations hold", f" in {name}"
    ratio, limit = format_against(worst.value, worst.limit)
    pooled = pool_resolutions(ratio for one in results.values() for ratio in one.judged)
    hidden, hidden_at_one = (
        format_number(max(pooled[name] for name in pooled if (name in _OF_ONE_TOKEN) is is_of_one))
        for is_of_one in (False, True)
    )
    origin = (results[name].level.model_extra or {})["limits_origin"]
    return (
        f"{whose}, over {format_count(num_tokens, 'token')}: the largest error{where},"
        f" {describe_error(worst.statistic, worst.actual)}, is {ratio}x that of the captured run"
        f" (limit {limit}x; {origin}). In {dtype}, errors of the run below {hidden} over all"
        f" tokens, or below {hidden_at_one} at one token, may not show."
    )


def combine(
    results: Mapping[str, LevelResult],
    notes: Sequence[str],
    cause: Cause | None = None,
    **fields: Any,  # noqa: ANN401 - more fields of the verdict
) -> tuple[Verdict, list[Measurement]]:
    """Make the verdict over all levels, with `fields`, and its measurements.

    cause: default: that of the worst failed level, of which the numbers are too.
    """
    wrong = [results[name] for name in _worst_first(results, Outcome.FAIL)][:1]
    judged = [ratio for one in wrong or results.values() for ratio in one.judged]
    numbers: DecidingNumbers = {}
    found = cause or next((one.cause for one in wrong if isinstance(one.cause, Cause)), Cause(None))
    if judged:
        worst, coarsest = find_worst(judged), max(one.resolution for one in judged)
        numbers = deciding_numbers(worst, worst.resolution if wrong else coarsest)
        if not math.isfinite(worst.value):
            found = Cause("non-finite", found.location)
    unmatched = [
        name for name, one in results.items() if not one.level.compared and name != _NO_EXPECTATION
    ]
    verdict = conclude(
        results,
        found,
        notes=[*notes_of(results), *notes],
        unmatched=Unmatched(expected=unmatched),
        **numbers,
        **fields,
    )
    return verdict, rows_of(results)


def _judge_one(
    name: str, expectation: Expectation, seen: Seen, here: AllSeen, run: str
) -> LevelResult:
    accept = _step_to_accept(seen.file, here.model_of(expectation), run)
    restore = step_to_verify(seen.file, run, here)
    facts: dict[str, Any] = {"expectation": expectation.hash}
    if seen.stale:
        facts |= {"stale": True, "summary": _STALE, "next": [restore, accept]}
    if seen.observed is None:
        elsewhere = step_to_verify(seen.file, run, here.model_copy(update={"model": "FOLDER"}))
        if seen.has_recorded_files:
            versions = describe_environment(expectation, here)
            why = f"changed since then: {versions}" if versions else _SAME_VERSIONS
            restore = replace(restore, purpose=_SAME_FILES.format(why))
        return _judge_without_outputs(seen, facts, restore, elsewhere.command)
    judged = judge_by(expectation, seen.observed.distributions)
    facts["limits_origin"] = expectation.limits_origin
    changed = [describe_environment(expectation, here), *seen.config]
    facts["since_capture"] = [one for one in changed if one]
    cause = Cause("stale") if seen.stale else None
    explained = explain(expectation, seen, here, run, accept)
    sentence = "" if explained is None else explained.sentence
    reasons = [*_describe_stale(seen, sentence), *filter(None, [sentence])]
    if explained is not None:
        facts |= {"drift": {"answer": explained.answer, "module": explained.module}}
        facts["next"] = explained.next_steps
        fault = _FAULTS.get(explained.answer)
        if fault and seen.stale:
            facts["summary"] = f"{_STALE}; besides, {fault}"
        elif is_within_limits(judged) and not seen.stale:
            facts["summary"] = "has other exact outputs than at the capture"
        cause = _cause_of(explained, is_stale=bool(seen.stale))
    reasons += _describe_size(judged, expectation, seen.observed, explained, facts)
    result = level_of_signature(name, expectation, judged, "; ".join(reasons) or None, facts)
    if seen.stale or explained is not None:
        result.level = result.level.model_copy(update={"verdict": Outcome.FAIL})
    result.notes += _notes_on(name, expectation, seen, here)
    if result.level.verdict is Outcome.PASS:
        rounding = describe_other_rounding(expectation, seen, here)
        result.notes += [f"{name}: {rounding}"] if rounding else []
    result.cause = cause
    return result


def _notes_on(name: str, expectation: Expectation, seen: Seen, here: AllSeen) -> Iterator[str]:
    if seen.model not in (None, here.model_of(expectation)):
        yield f"{name}: {expectation.model} is not in this folder: {seen.model} ran"
    if seen.exact_left_out is not None:
        left_out = "the exact outputs were not compared with the captured ones"
        if here.setup:
            left_out += (
                ", and the setup function did not run in float64, so"
                f" {here.machine.dtype} may hide its effect"
            )
        yield f"{name}: {left_out}: {seen.exact_left_out}"
    if seen.setup_effect and (effect := describe_setup_effect(expectation, seen.setup_effect)):
        yield f"{name}: {effect}"


def _judge_without_outputs(
    seen: Seen, facts: Mapping[str, Any], restore: NextStep, elsewhere: str
) -> LevelResult:
    """Judge a model that is absent or could not run.

    facts: of the level. elsewhere: the command that loads the model from another folder.
    """
    if seen.missing is not None:
        pull = NextStep("fetch the file, then", "git lfs pull")
        is_pointer = pull.command in seen.missing
        other = NextStep("or name the folder that holds the model now", elsewhere)
        return not_compared(seen.missing, next=[pull if is_pointer else restore, other])
    if seen.stale:
        reason = "; ".join([*_describe_stale(seen), *filter(None, [seen.problem])])
        return failed(0, reason, "stale", **facts)
    reasons = [*filter(can_move_outputs, seen.config), seen.problem or "no outputs"]
    # A new capture would meet the same problem.
    return failed(0, "; ".join(reasons), summary=_WITHOUT_MODEL, next=[restore], **facts)


def _describe_stale(seen: Seen, elsewhere: str = "") -> list[str]:
    """Describe different content, with the changes of config.json that `elsewhere` does not name; [] for none."""
    if not seen.stale:
        return []
    stale = "; ".join(seen.stale)
    config = [one for one in seen.config if one not in stale and one not in elsewhere]
    return [f"stale, different content: {'; '.join([stale, *config])}"]


_STALE = "is stale: its model or its inputs changed"
_WITHOUT_MODEL = "cannot be verified: its model cannot be loaded or run"
_SAME_FILES = "the model's files are those of the capture; {}. verify.log has the traceback. Correct the code, then"
_SAME_VERSIONS = "no version changed, so a library or the setup function may be wrong"
# What the answer adds to a stale expectation.
_FAULTS: Mapping[Answer, str] = {
    "code": "the model's code changed",
    "run": "the run itself is wrong",
}


def _cause_of(explained: Explained, *, is_stale: bool) -> Cause:
    diagnosis: Diagnosis | None = "stale" if is_stale or explained.answer == "files" else None
    if explained.module is None:
        return Cause(diagnosis)
    if explained.answer in _FAULTS or (explained.answer != "files" and not is_stale):
        diagnosis = "module-error"
    return Cause(diagnosis, Location(phase="forward", module=explained.module))


def _step_to_accept(file: str, model: str, run: str) -> NextStep:
    """Return the step that captures again. A shipped file is never replaced."""
    purpose, output = "if the change is intended", file
    if Path(file).resolve().parent == SHIPPED.resolve():
        output = _OWN_FOLDER
        purpose += f" (the shipped file belongs to assay: your own goes to {output}/)"
    return NextStep(purpose, recapture_command(model, run, output))


def level_of_signature(
    name: str,
    expectation: Expectation,
    judged: Judged,
    reason: str | None,
    facts: Mapping[str, Any],
) -> LevelResult:
    """Make the result of the level `name`, with `facts` in the verdict."""
    ratios = tuple(judged.values())
    num_tokens = len(tokens_of(expectation.signature.spreads))
    level = level_of(num_tokens, int(not is_within_limits(judged)), {"reason": reason, **facts})
    port = f"output.{'+'.join(expectation.signature.outputs) or 'logits'}"
    rows = [one.measurement(name, port) for one in ratios]
    return LevelResult(level, rows, judged=ratios)


def _describe_size(
    judged: Judged,
    expectation: Expectation,
    observed: Observed,
    explained: Explained | None,
    facts: Mapping[str, Any],
) -> Iterator[str]:
    """Describe the error of a run that fails, or that is stale."""
    size = describe_worst(judged, "the error of the captured run")
    if not is_within_limits(judged):
        form = describe_form(expectation.signature, observed, expectation.key.machine.dtype)
        yield from filter(None, [form, size])
    elif explained is not None:
        yield f"the outputs of the run are within the limits: {size}"
    elif "stale" in facts:
        yield "the outputs on the recorded tokens are within the limits"


def _require_coverage(name: str, result: LevelResult, coverage: Coverage) -> None:
    """Change a PASS to NOT_COMPARED if part of the model did not contribute."""
    update: dict[str, object] = {"coverage": describe_coverage(coverage)}
    if coverage.forbidden_gaps and result.level.verdict is Outcome.PASS:
        reason = f"{'; '.join(list_gaps(coverage))}; --allow-unused GLOB passes without them"
        update |= {"verdict": Outcome.NOT_COMPARED, "reason": reason}
    result.level = result.level.model_copy(update=update)
    result.notes += [f"{name}: {note}" for note in notes_on_coverage(coverage)]


def _describe_elsewhere(name: str, there: Machine, here: Machine) -> str:
    """Describe an expectation of another machine or dtype."""
    if (there.vendor, there.architecture) != (here.vendor, here.architecture):
        differing = ", ".join(machine_differences(there, here))
        return f"{name} belongs to another machine: {differing}"
    operands = "" if there.precision == there.dtype else f" with operands in {there.precision}"
    return f"{name} is not verified here: it is of {there.dtype}{operands}"


def _steps_to_capture(
    expectations: Sequence[Expectation], here: AllSeen, run: str
) -> list[NextStep]:
    """Return the commands that capture the models on this machine, each with the inputs of its file."""
    folder = Path(here.seen[0].file).parent
    output = _OWN_FOLDER if folder.resolve() == SHIPPED.resolve() else str(folder)
    models: dict[str, dict[str, None]] = {}  # by the file with their inputs
    for expectation, seen in zip(expectations, here.seen, strict=True):
        file = expectation.options_of_capture(seen.file).get("prompts", "")
        models.setdefault(str(file), {})[here.model_of(expectation)] = None
    return [
        NextStep("", assay_command(
            *("expect", "capture", *(names if len(names) <= _MAX_SHOWN else ["MODEL"])),
            run=run, output=output, prompts=file or None,
        ))
        for file, names in models.items()
    ]  # fmt: skip


def _condense(elsewhere: Mapping[str, str]) -> list[str]:
    """Return the descriptions, or a single note if there are many."""
    if len(elsewhere) <= _MAX_SHOWN:
        return list(elsewhere.values())
    names = name_some([*elsewhere])
    return [f"{len(elsewhere)} expectations belong to other machines or dtypes: {names}"]


def _names(seen: Sequence[Seen]) -> list[str]:
    """Return the file names, or whole paths if two names are equal."""
    stems = [Path(one.file).stem for one in seen]
    unique = len(set(stems)) == len(stems)
    return stems if unique else [one.file for one in seen]
