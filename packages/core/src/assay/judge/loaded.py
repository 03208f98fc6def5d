"""The level `load`: compare the loaded model with its files, and list later changes. Imports no torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from assay.errors import name_some
from assay.judge.levels import DiagnosedFault, LevelResult, level_of, not_run
from assay.judge.wording import format_number
from assay.models.inspect.report import LoadReport, SetupChanges, UnreadKey, WeightDifference
from assay.sites import Phase
from assay.verdicts import Diagnosis, Level, Location, Outcome

_NOT_INSPECTED = "captured by a version of assay that did not compare models with their files"


@dataclass(frozen=True, slots=True)
class JudgedLoad:
    """The judged level, and its findings, the most important one first."""

    result: LevelResult
    loading: list[DiagnosedFault] = field(default_factory=list)
    """Findings right after loading."""
    changed: list[DiagnosedFault] = field(default_factory=list)
    """Weights that a setup function, or a trainer before its first step, changed beyond rounding."""


def judge_load(reports: Sequence[LoadReport], changes: Sequence[SetupChanges] = ()) -> JudgedLoad:
    """Judge the load reports of all processes of a check.

    reports: from the trusted process and all processes of the candidate. Equal findings are merged.
    changes: from the candidate's processes, after loading.
    """
    if not reports:
        return JudgedLoad(not_run(_NOT_INSPECTED))
    loading = _each_once(finding for report in reports for finding in _find_in(report))
    changed = _each_once(
        _of_weight(weight, "forward", "changed after loading, before the first forward pass,")
        for one in changes
        for weight in one.weights
        if weight.beyond_rounding
    )
    compared = max(report.compared for report in reports)
    found = [*loading, *changed]
    missing = list(dict.fromkeys(name for report in reports for name in report.not_compared))
    notes = list(dict.fromkeys(note for report in reports for note in _notes_on(report)))
    notes += dict.fromkeys(note for one in changes for note in _notes_on_changes(one))
    level = level_of(compared, len(found), {})
    if found:
        reason = name_some([finding.reason or "" for finding in found], 1)
        level = level.model_copy(update={"reason": reason})
    if missing:
        text = f"not compared with the files: {name_some(missing)}"
        notes.append(text)
        if not found:
            level = Level(verdict=Outcome.NOT_COMPARED, reason=text, compared=compared)
    return JudgedLoad(LevelResult(level, notes=notes), loading, changed)


def _find_in(report: LoadReport) -> list[DiagnosedFault]:
    wrong = [one for one in report.weights if one.problem != "differs" or one.beyond_rounding]
    made = [one for one in wrong if one.problem in ("varies", "not-built")]
    found = [
        _of_weight(one, "checkpoint", "differs from the stored value")
        for one in wrong
        if one not in made
    ]
    found += [
        _without_place("checkpoint-mismatch", "checkpoint", describe_key(key))
        for key in report.keys
        if key.problem != "unread"
    ]
    found += [_without_place("checkpoint-mismatch", "checkpoint", text) for text in report.settings]
    # A wrong setting explains values that the model's code computes, so it comes first.
    found += [_of_weight(one, "checkpoint", "differs from the stored value") for one in made]
    found += [
        _without_place("checkpoint-mismatch", "checkpoint", text) for text in report.generation
    ]
    return found + [_without_place("inputs-differ", "inputs", text) for text in report.tokenizer]


def _of_weight(weight: WeightDifference, phase: Phase, fault: str) -> DiagnosedFault:
    module = weight.name.rpartition(".")[0]
    location = Location(phase=phase, module=module, parameter=weight.name)
    return DiagnosedFault("weight-mismatch", location, describe_weight(weight, fault))


def _without_place(diagnosis: Diagnosis, phase: Phase, reason: str) -> DiagnosedFault:
    return DiagnosedFault(diagnosis, Location(phase=phase), reason)


def describe_weight(weight: WeightDifference, fault: str) -> str:
    """Describe a wrong parameter or buffer. fault: what it does, such as "differs from the stored value"."""
    if weight.problem == "not-stored":
        return f"{weight.name} is loaded from no tensor of the files"
    where = _describe_rows(weight)
    if weight.problem == "varies":
        return (
            f"{weight.name} is in no file, and a second load has other values in {where}: it depends"
            " on the seed, or was never written"
        )
    if weight.problem == "not-built":
        return (
            f"{weight.name} is in no file, and building its class from config.json alone makes other"
            f" values in {where}: relative error {format_number(weight.error)}"
        )
    text = f"{weight.name} {fault} in {where}: relative error {format_number(weight.error)}"
    if weight.values_of:
        return f"{text}; it holds the values of {weight.values_of}"
    change = weight.change.removesuffix(".")
    return f"{text}; {change[0].lower()}{change[1:]}" if change else text


def _describe_rows(weight: WeightDifference) -> str:
    first, last = weight.rows
    if weight.num_differing == weight.num_rows:
        return "its one row" if weight.num_rows == 1 else f"all {weight.num_rows:,} rows"
    if first == last:
        return f"row {first} of {weight.num_rows:,}"
    rows = f"rows {first:,} to {last:,} of {weight.num_rows:,}"
    if weight.num_differing < last - first + 1:
        rows = f"{weight.num_differing:,} of the {rows}"
    return rows


def describe_key(key: UnreadKey) -> str:
    """Describe a key of config.json that no code reads."""
    if key.problem == "overridden":
        stored = key.stored or "another value"  # reports of earlier versions
        return f"config.json: {key.key} is {key.used} in memory, {stored} in the file"
    text = f"config.json: no code reads the key {key.key}"
    if key.problem == "misplaced":
        return f"{text}; it looks for {key.nearest} outside of it, and took a default"
    if key.problem == "misspelt":
        return f"{text}; {key.nearest}, which is read, is not in the file: its default was used"
    return f"{text}; the nearest that is read is {key.nearest}" if key.nearest else text


def _notes_on(report: LoadReport) -> list[str]:
    notes = [describe_key(key) for key in report.keys if key.problem == "unread"]
    if report.unused:
        notes.append(
            f"the files hold tensors that the model does not use: {name_some(report.unused)}"
        )
    if report.non_finite:
        notes.append(f"NaN or infinity in loaded weights: {name_some(report.non_finite)}")
    rounded = [
        weight.name
        for weight in report.weights
        if weight.problem == "differs" and not weight.beyond_rounding
    ]
    if rounded:
        notes.append(f"not rounded to nearest: {name_some(rounded)}")
    return notes + report.notes


def _notes_on_changes(changes: SetupChanges) -> list[str]:
    notes = []
    if rounded := [weight.name for weight in changes.weights if not weight.beyond_rounding]:
        notes.append(f"rounded after loading, before the first forward pass: {name_some(rounded)}")
    if changes.replaced:
        notes.append(
            "replaced, or cast to another dtype, after loading, so that their values cannot be compared:"
            f" {name_some(changes.replaced)}"
        )
    return notes


def _each_once(findings: Iterable[DiagnosedFault]) -> list[DiagnosedFault]:
    found: list[DiagnosedFault] = []
    for finding in findings:
        if finding.reason not in [one.reason for one in found]:
            found.append(finding)
    return found
