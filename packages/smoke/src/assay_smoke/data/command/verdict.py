"""The verdict on the data side: one level per kind of code."""

from collections.abc import Sequence

from assay.comparing.levels import outcome_of_levels
from assay.verdicts import Diagnosis, Level, Outcome, Verdict
from assay_smoke.data.command.requests import (
    LEVELS,
    NOT_ASKED_FOR,
    CheckReport,
    DataAnswer,
    DataLevel,
    DataRequest,
)
from assay_smoke.data.properties import BrokenProperty, SubjectReport

_DIAGNOSES: dict[DataLevel, Diagnosis] = {"accumulation": "loss-scale", "workers": "rng-state"}
_OTHERWISE: Diagnosis = "inputs-differ"


def judge_data(request: DataRequest, answer: DataAnswer) -> Verdict:
    """Judge all levels. FAIL if a property is broken, NOT_COMPARED if one was never tried or none checked."""
    levels: dict[str, Level] = {}
    for name in LEVELS:
        checks = [check for check in answer.checks if check.level == name]
        levels[name] = (
            _judge_level(checks)
            if checks
            else Level(verdict=None, reason=answer.left_out.get(name, NOT_ASKED_FOR))
        )
    failed = [name for name in LEVELS if levels[name].verdict is Outcome.FAIL]
    notes = [
        f"{check.report.subject}: {note}" for check in answer.checks for note in check.report.notes
    ]
    own = list(dict.fromkeys(request.own_code.values()))
    return Verdict(
        verdict=outcome_of_levels(levels),
        model={"name": request.model or "generated tokenizers"},
        reference={"run": "the properties of docs/smoke-data.md"},
        candidate={"run": ", ".join(own) or ("its template" if request.model else "libraries")},
        levels=levels,
        diagnosis=_DIAGNOSES.get(failed[0], _OTHERWISE) if failed else None,
        notes=list(dict.fromkeys([*answer.notes, *notes])),
        statistic="exact",
        resolution=0.0,
        compared=sum(level.compared for level in levels.values()),
        compared_unit="cases",
    )


def _judge_level(checks: Sequence[CheckReport]) -> Level:
    reports = [check.report for check in checks]
    compared = sum(report.compared for report in reports)
    subjects = [report.model_dump(mode="json") for report in reports]
    found = [(report, finding) for report in reports for finding in report.findings]
    incomplete = list(filter(None, map(_find_gap, checks)))
    outcome, reason = Outcome.PASS, None
    if incomplete:
        outcome, reason = Outcome.NOT_COMPARED, "; ".join(incomplete)
    if found:
        outcome, reason = Outcome.FAIL, _describe(found)
    return Level.model_validate(
        {"verdict": outcome, "reason": reason, "compared": compared, "subjects": subjects}
    )


def _find_gap(check: CheckReport) -> str:
    """Describe a promised property that was not tried."""
    if check.problem:
        return check.problem
    if check.report.untried:
        return f"{check.report.subject}: never tried: {', '.join(check.report.untried)}"
    return "" if check.report.compared else f"{check.report.subject}: tried no case"


def _describe(found: Sequence[tuple[SubjectReport, BrokenProperty]]) -> str:
    report, finding = found[0]
    rest = len(found) - 1
    more = f" (and {rest} more)" if rest else ""
    return f"{report.subject}: {finding.reason}{more}"
