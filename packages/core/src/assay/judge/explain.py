"""A verdict in words, which all formats share, and the measurements that its text quotes."""

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from assay.errors import name_some
from assay.foreign_text import one_line
from assay.judge.coverage import describe_coverage, list_gaps
from assay.judge.levels import level_at
from assay.judge.wording import (
    BLIND_PLACE,
    PHASES,
    SEEN,
    describe_error,
    describe_location,
    describe_place,
    describe_port,
    describe_ratio,
    describe_sides,
    format_against,
    format_count,
    format_number,
    is_against_target,
    load_diagnoses,
)
from assay.sites import Phase
from assay.statistics import GENERAL, STATISTICS, TOKEN_STATISTIC
from assay.verdicts import Coverage, Location, Measurement, Number, Outcome, Record, Verdict

Key = TypeVar("Key", bound=Hashable)

# Level, module, phase and rank.
Place = tuple[str, str, Phase, int]


class ShownElement(Record):
    """The element with the largest difference at the place that decided."""

    prompt: int
    position: int
    """Prompt and position are -1 if the element does not belong to a token."""
    channel: int
    actual: Number
    expected: Number


@dataclass(frozen=True, slots=True)
class DecidingRows:
    """Measurements that the text of a verdict quotes."""

    deciding: Measurement | None = None
    """The row whose ratio decided; None if no row holds exactly that ratio."""
    worst_token: Measurement | None = None
    """The worst single token at the place of the error."""
    worst_element: ShownElement | None = None
    limits_origin: str | None = None
    """The origin of the limit, as in "calibrated on 312 clean runs"."""
    error: float | None = None
    """The candidate's error behind the deciding ratio; None if no file holds it."""
    coarsest: dict[str, Measurement] = field(default_factory=dict)
    """By level, the row with the coarsest resolution for errors of any form."""
    stated: dict[Place, Measurement] = field(default_factory=dict)
    """By place, the row whose ratio the verdict or its worst suspect there states."""

    def find_worst(self, rows: Iterable[tuple[Key, Measurement]]) -> dict[Key, Measurement]:
        """Return the row to report for each key: the worst, or the one that is stated for the same place."""
        worst = find_worst_rows(rows)
        return {key: self.stated.get(_place_of(row), row) for key, row in worst.items()}


def severity(value: float) -> float:
    """Return a key that ranks ratios: NaN is as bad as infinity."""
    return math.inf if math.isnan(value) else value


def rank_by_ratio(measurement: Measurement) -> float:
    """Return a key that ranks rows of one statistic."""
    return severity(measurement.ratio)


def shown_ratio(measurement: Measurement) -> float | None:
    """Return the ratio of a row; None for values that are shown without noise."""
    ratio = measurement.ratio
    if not math.isnan(ratio):
        return ratio
    values = measurement.actual, measurement.expected
    return None if all(math.isfinite(value) for value in values) else ratio


def rank_of(measurement: Measurement) -> float:
    """Return a key that ranks rows, the worst highest; rows without a ratio are lowest."""
    ratio = shown_ratio(measurement)
    return -1.0 if ratio is None else severity(ratio)


def over_limit(measurement: Measurement) -> float:
    """Return a key that ranks judged rows of different statistics: ratio / limit."""
    limit = measurement.limit
    if not limit:
        return severity(measurement.ratio)
    return severity(measurement.ratio / limit)


def find_worst_rows(
    rows: Iterable[tuple[Key, Measurement]],
    rank: Callable[[Measurement], Any] = over_limit,
) -> dict[Key, Measurement]:
    """Return the row of highest rank for each key, the first of equal ones."""
    worst: dict[Key, Measurement] = {}
    for key, row in rows:
        if key not in worst or rank(row) > rank(worst[key]):
            worst[key] = row
    return worst


def find_coarsest_rows(rows: Iterable[Measurement]) -> dict[str, Measurement]:
    """Return for each level the row of coarsest resolution, of its most general statistic.

    Updates that rounding hides are left out: a note of the verdict names them.
    """
    judged = (
        row
        for row in rows
        if row.limit
        and row.statistic in GENERAL
        and not (row.level == "updates" and row.resolution >= 1)
    )
    keyed = ((row.level, row) for row in judged)
    return find_worst_rows(keyed, lambda row: (-GENERAL.index(row.statistic), row.resolution))


def find_deciding_rows(verdict: Verdict, measurements: Iterable[Measurement]) -> DecidingRows:
    """Find the rows behind the numbers of `verdict`."""
    measurements = list(measurements)
    near = [row for row in measurements if _is_at(row, verdict.location)]
    tokens = [row for row in near if row.statistic == TOKEN_STATISTIC and row.prompt is not None]
    deciding = next((row for row in near if _decided(row, verdict)), None)
    extras = _extras(verdict, deciding)
    element = extras.get("worst_element", {})  # for older runs, which have only an index
    return DecidingRows(
        deciding=deciding,
        worst_token=max(tokens, key=rank_by_ratio, default=None) if verdict.location else None,
        worst_element=ShownElement.model_validate(element) if "channel" in element else None,
        limits_origin=extras.get("limits_origin"),
        error=deciding.actual if deciding else _error_of_suspect(verdict),
        coarsest=find_coarsest_rows(measurements),
        stated=_find_stated(verdict, measurements, deciding),
    )


def _place_of(row: Measurement) -> Place:
    return row.level, row.module, row.phase, row.rank


def _find_stated(
    verdict: Verdict, measurements: Iterable[Measurement], deciding: Measurement | None
) -> dict[Place, Measurement]:
    """Find the rows of the suspects, and of the verdict, by place."""
    wanted: dict[tuple[object, ...], None] = {}
    for one in verdict.suspects:
        at = one.location
        wanted[at.module, at.phase, at.rank, one.statistic, one.noise_ratio] = None
    found: dict[tuple[object, ...], Measurement] = {}
    for row in measurements:
        found.setdefault((row.module, row.phase, row.rank, row.statistic, row.ratio), row)
    rows = [found[key] for key in reversed(wanted) if key in found]  # the worst is last
    rows += [deciding] if deciding and verdict.location else []
    return {_place_of(row): row for row in rows}


def _error_of_suspect(verdict: Verdict) -> float | None:
    """Return the deciding error from the suspects when the measurements are unavailable."""
    decided = (verdict.noise_ratio, verdict.statistic)
    return next(
        (one.error for one in verdict.suspects if (one.noise_ratio, one.statistic) == decided), None
    )


def _is_at(row: Measurement, location: Location | None) -> bool:
    if location is None:
        return True
    # A fault without a single module is shown by the row that decided, in any module.
    return row.phase == location.phase and location.module in (None, row.module)


def _decided(row: Measurement, verdict: Verdict) -> bool:
    if verdict.noise_ratio is None or row.statistic != verdict.statistic:
        return False
    both_nan = math.isnan(row.ratio) and math.isnan(verdict.noise_ratio)
    return both_nan or row.ratio == verdict.noise_ratio


def _extras(verdict: Verdict, deciding: Measurement | None) -> dict[str, Any]:
    """Return the facts that the judge left with the deciding level."""
    names = [deciding.level] if deciding else []
    names += [name for name, level in verdict.levels.items() if level.verdict is verdict.verdict]
    for name in names:
        level = verdict.levels.get(name)
        if level is not None and level.model_extra:
            return level.model_extra
    return {}


MAX_LISTED = 5  # names of a longer list that a message prints

# Scope of the noise, by level.
_SAME = {"logits": "of the same tokens", "tokens": "of the same token"}

_MADE_AFTER_LOADING = "it was loaded correctly, and changed before any computation: it counts even if no input uses it"


@dataclass(frozen=True, slots=True)
class Explanation:
    """A verdict in words."""

    title: str
    """Outcome and sides in one line."""
    headline: str
    """The difference, or the agreement."""
    details: tuple[str, ...] = ()
    """One fact each."""
    next_command: str | None = None

    @property
    def message(self) -> str:
        """Return headline, details and next command, as a failing test shows them."""
        lines = [self.headline, *(f"  {detail}" for detail in self.details)]
        if self.next_command:
            lines.append(f"Next: {self.next_command}")
        return "\n".join(lines)


def explain_verdict(verdict: Verdict, evidence: DecidingRows) -> Explanation:
    """Put `verdict` into words."""
    if verdict.headline:
        headline = verdict.headline
        reasons = _list_reasons(verdict, Outcome.FAIL, Outcome.NOT_COMPARED, None)
        if len(verdict.levels) == 1 and headline.startswith(f"{next(iter(verdict.levels))} "):
            reasons = [reason.partition(": ")[2] for reason in reasons]  # the headline has the name
        details = [line for reason in reasons for line in _split_clauses(reason)]
        if verdict.diagnosis:
            details.append(_describe_diagnosis(verdict.diagnosis, verdict.location))
    elif verdict.verdict is Outcome.FAIL:
        headline, details = _explain_failure(verdict, evidence)
    elif verdict.verdict is Outcome.PASS and set(verdict.levels) == {"load"}:
        headline, details = "The loaded model equals its files.", [_describe_compared(verdict)]
    elif verdict.verdict is Outcome.PASS:
        headline, details = _headline_of_pass(verdict.coverage), _explain_pass(verdict, evidence)
    else:
        headline = _headline_of_gaps(verdict.coverage)
        details = _explain_not_compared(verdict)
    if verdict.coverage is not None:
        details = [*details, describe_coverage(verdict.coverage)]
    return Explanation(
        f"{verdict.verdict.value}: {describe_sides(verdict)}",
        one_line(headline),
        tuple(one_line(detail) for detail in details),
        "\n".join(map(str, verdict.next_steps)) or explain_command(verdict),
    )


def explain_command(verdict: Verdict) -> str | None:
    """Return the command that explains the diagnosis of a failure; None without one."""
    if verdict.verdict is Outcome.FAIL and verdict.diagnosis:
        return f"assay explain {verdict.diagnosis}"
    return None


def describe_cause(verdict: Verdict) -> str:
    """State in one line why `verdict` is not a PASS; "" for a PASS, or if only a ratio says it."""
    if verdict.verdict is Outcome.PASS:
        return ""
    causes = _list_reasons(verdict, verdict.verdict)
    causes += [verdict.headline] if verdict.headline else []
    if verdict.verdict is Outcome.NOT_COMPARED:
        causes += [*_list_missing(verdict), _headline_of_gaps(verdict.coverage)]
    return one_line(causes[0]) if causes else ""


def _headline_of_pass(coverage: Coverage | None) -> str:
    if coverage is None or not coverage.gaps:
        return "The candidate agrees with the reference."
    return f"What ran of the model agrees with the reference; {'; '.join(list_gaps(coverage))}."


def _headline_of_gaps(coverage: Coverage | None) -> str:
    if coverage is None or not coverage.forbidden_gaps:
        return "Not everything that was asked for could be compared: this is not a pass."
    return f"Part of the model was not compared: {'; '.join(list_gaps(coverage))}."


def _list_reasons(verdict: Verdict, *outcomes: Outcome | str | None) -> list[str]:
    """Return the reasons of all levels with one of these outcomes, each after the levels that share it.

    outcomes: "not judged" and "not run" are kinds of None.
    """
    named: dict[str, list[str]] = {}
    for name, level in verdict.levels.items():
        kinds = level.verdict, level.outcome_in_words
        if level.reason and not {*kinds}.isdisjoint(outcomes):
            named.setdefault(level.reason, []).append(name)
    return [f"{', '.join(names)}: {reason}" for reason, names in named.items()]


# More clauses are hard to read in a line.
_MOST_CLAUSES = 2


def _split_clauses(reason: str) -> list[str]:
    """Return each clause of a long reason as a line, the later ones indented."""
    first, *others = reason.split("; ")
    return [first, *(f"  {one}" for one in others)] if len(others) >= _MOST_CLAUSES else [reason]


# Smaller parts of a limit are ordinary noise, of which a PASS says nothing.
_NEAR_LIMIT = 0.5


def _explain_pass(verdict: Verdict, evidence: DecidingRows) -> list[str]:
    details = [_describe_compared(verdict)]
    details += [
        f"{words}: {'; '.join(skipped)}"
        for words in ("not judged", "not run")
        if (skipped := _list_reasons(verdict, words))
    ]
    if verdict.limit and (verdict.noise_ratio or 0.0) >= _NEAR_LIMIT * verdict.limit:
        where = ""
        if (row := evidence.deciding) is not None:
            at = Location(phase=row.phase, step=row.step, rank=row.rank, module=row.module)
            where = f" at {row.level if verdict.compared_unit else describe_location(at)}"
        details.append(f"nearest to its limit{where}: {_describe_ratio(verdict, evidence)}")
    if verdict.compared_unit is None:
        details.append(
            describe_resolution(verdict, evidence)
            or "the resolution is unknown: a small error may be unseen"
        )
    if verdict.diagnosis:
        details.append(_describe_diagnosis(verdict.diagnosis, verdict.location))
    return details


def _explain_failure(verdict: Verdict, evidence: DecidingRows) -> tuple[str, list[str]]:
    overfit = verdict.levels.get("overfit")
    details: list[str | None]
    if overfit is not None:
        # Nothing was injected into any stage: a fault appears in the memorized sequences.
        headline = "The candidate does not memorize the sequences that the reference memorizes."
        details = [overfit.reason, _describe_ratio(verdict, evidence)]
    elif verdict.compared_unit and verdict.levels:
        # No stage was replayed: the levels give the reasons.
        failed = [
            (n, level) for n, level in verdict.levels.items() if level.verdict is Outcome.FAIL
        ]
        headline, *others = [
            f"{name}: {level.reason or 'over its limit'}" for name, level in failed
        ]
        details = [*others, _describe_ratio(verdict, evidence)]
    elif _fails(verdict, "load") and verdict.noise_ratio is None:
        # The error precedes all computation, so that no ratio shows it.
        headline, details = _explain_load(verdict, verdict.location)
    else:
        headline = _failure_headline(verdict, verdict.location, evidence.deciding)
        details = _explain_place(verdict, evidence)
    if verdict.diagnosis:
        details.append(_describe_diagnosis(verdict.diagnosis, verdict.location))
    return headline, [detail for detail in details if detail]


def _explain_place(verdict: Verdict, evidence: DecidingRows) -> list[str | None]:
    """Return details of the place that the verdict names, or of its absence."""
    location = verdict.location
    level = level_at(location) if location else ""
    reason = verdict.levels[level].reason if _fails(verdict, level) else None
    is_loaded_wrongly = location is not None and _fails(verdict, "load")
    details: list[str | None] = [
        verdict.levels["load"].reason if is_loaded_wrongly else None,
        reason,
    ]
    if not (reason and _must_be_zero(verdict.statistic)):
        details.append(_describe_ratio(verdict, evidence))
    if not _must_be_zero(verdict.statistic):  # the worst row is that of other statistics
        details.append(_describe_worst(evidence))
    if (token := verdict.first_bad_token) is not None:
        # The generated tokens may still all be right.
        place = f"prompt {token.prompt}, position {token.position} ({token.phase})"
        details.append(f"first token affected: {place}")
    if _fails(verdict, "tokens"):
        details.append(verdict.levels["tokens"].reason)
    if location is None:
        return details + _explain_no_place(verdict)
    return [*details, _describe_origin(location, reason)]


def _describe_origin(location: Location, reason: str | None) -> str | None:
    """State that the error is made at `location`; None if it is not made at one place."""
    is_in_all_modules = location.module is None and location.phase in ("forward", "backward")
    if is_in_all_modules or (reason and location.phase != "checkpoint"):
        return None
    return PHASES[location.phase].made_here


def _fails(verdict: Verdict, level: str) -> bool:
    return level in verdict.levels and verdict.levels[level].verdict is Outcome.FAIL


def _explain_load(verdict: Verdict, location: Location | None) -> tuple[str, list[str | None]]:
    """Return headline and details if the level `load` decided."""
    changed = location is not None and location.phase == "forward"
    has_name = location is not None and location.parameter
    what = describe_place(location) if location is not None and has_name else "The loaded model"
    headline = f"{what} differs from {'the reference' if changed else 'its files'}."
    if has_name and not changed:
        headline = f"{what} differs from the files."
    details = [verdict.levels["load"].reason]
    if location is not None:
        details.append(_MADE_AFTER_LOADING if changed else PHASES[location.phase].made_by_loading)
    return headline, details


def _explain_no_place(verdict: Verdict) -> list[str | None]:
    """Describe the result of the level that looks for a place, and the failures of other levels."""
    details: list[str | None] = [
        reason
        for reason in _list_reasons(verdict, Outcome.FAIL)
        if not reason.startswith("tokens: ")
    ]
    modules = verdict.levels.get("modules")
    if modules is not None and modules.verdict is Outcome.PASS:
        details.append("every module agrees where it gets the reference's own inputs")
    elif modules is not None and modules.verdict is None:
        details.append(f"modules were not compared: {modules.reason or 'no reason was given'}")
    return details


def _explain_not_compared(verdict: Verdict) -> list[str]:
    details = [_describe_compared(verdict)]
    details += [
        f"{name} was not compared: {level.reason}"
        for name, level in verdict.levels.items()
        if level.verdict is Outcome.NOT_COMPARED
    ]
    return details + _list_missing(verdict)


def _list_missing(verdict: Verdict) -> list[str]:
    missing = verdict.unmatched.expected
    text = f"expected and not found ({len(missing):,}): {name_some(missing, MAX_LISTED)}"
    return [text] if missing else []


def _failure_headline(verdict: Verdict, location: Location | None, row: Measurement | None) -> str:
    if location is None:
        failed = [name for name, level in verdict.levels.items() if level.verdict is Outcome.FAIL]
        at = f" in {_joined(failed)}" if failed else ""
        return f"The candidate differs from the reference{at}; no single place explains it."
    words = PHASES[location.phase]
    plural = words.is_plural and describe_place(location) == words.subject
    verb: Literal["differ", "differs"] = "differ" if plural else "differs"
    place = describe_location(location)
    if row is not None and location.module and not (location.op or location.parameter):
        place += describe_port(row.port)
    return f"{place} {verb} from the reference."


def _describe_ratio(verdict: Verdict, evidence: DecidingRows) -> str:
    ratio, limit = verdict.noise_ratio, verdict.limit
    if ratio is None:
        return ""
    row = evidence.deciding
    if verdict.statistic is not None and _must_be_zero(verdict.statistic):
        entry = STATISTICS[verdict.statistic]
        return f"{entry.failure or entry.words}{f', at {row.port}' if row else ''}"
    what = describe_error(verdict.statistic or "error", evidence.error)
    if is_against_target(verdict.statistic):
        target = f" of {format_number(row.expected)}" if row else ""
        return f"{what} = {format_number(ratio)}x the target{target}"
    shown, shown_limit = format_against(ratio, ratio if limit is None else limit)
    source = f", {evidence.limits_origin}" if evidence.limits_origin else ""
    of_limit = "" if limit is None else f"limit {shown_limit}x{source}"
    if not math.isfinite(ratio):
        with_limit = f", {of_limit}" if of_limit else ""
        return f"{what}: no noise explains it (ratio {ratio}{with_limit})"
    end = f" ({of_limit})" if of_limit else ""
    return f"{what} = {shown}x the {_describe_noise(verdict, row)}{end}"


def _must_be_zero(statistic: str | None) -> bool:
    return statistic in STATISTICS and STATISTICS[statistic].judged_by == "zero"


# A resolution above it: half of the value may be lost unseen.
_COARSE = 0.5


def describe_resolution(verdict: Verdict, rows: DecidingRows) -> str | None:
    """State the relative error above which the run sees all, and where; None if unknown, or not relative."""
    if verdict.resolution is None or verdict.compared_unit:
        return None
    if not verdict.resolution:
        return "resolution 0: values that must be equal are compared exactly"
    others, row = [], rows.deciding
    if verdict.verdict is not Outcome.FAIL:
        row = None
        for level, coarsest in rows.coarsest.items():
            if math.isclose(coarsest.resolution, verdict.resolution):
                row = coarsest
            else:
                hardly = (
                    _describe_coarse(verdict, coarsest) if coarsest.resolution > _COARSE else ""
                )
                others.append(f"{level} {format_number(coarsest.resolution)}{hardly}")
    where = f" ({row.level}, at {one_line(row.module) or '(model)'})" if row else ""
    stated = ", ".join((f"{format_number(verdict.resolution)}{where}", *others))
    return f"resolution {stated}: {BLIND_PLACE if verdict.resolution >= 1 else SEEN}"


def _describe_coarse(verdict: Verdict, row: Measurement) -> str:
    run = str(verdict.candidate.get("run") or "")
    if not run.endswith("/float32"):
        return " (hardly checked; float32 sees more)"
    return f" (hardly checked at {one_line(row.module) or '(model)'}: its values are random, or nearly cancel)"


def _describe_noise(verdict: Verdict, row: Measurement | None) -> str:
    if verdict.compared_unit:
        return "difference that chance explains"
    run = str(verdict.candidate.get("run") or "")
    dtype = run.rpartition("/")[2]
    level = verdict.levels.get(row.level) if row and row.statistic != "trajectory-error" else None
    if level is not None:
        # Of what is kept in another dtype than the run computes in.
        dtype = str((level.model_extra or {}).get("noise_dtype", dtype))
    same = _SAME.get(row.level, "of the same module") if row else "of the same place"
    return f"{dtype} noise {same}".lstrip()


def _describe_worst(evidence: DecidingRows) -> str | None:
    parts: list[str] = []
    row, element = evidence.worst_token, evidence.worst_element
    if row:
        error = f"error {format_number(row.actual)}"
        if math.isfinite(row.ratio):
            error += f" = {describe_ratio(row.ratio)} its noise"
        parts.append(f"worst row: prompt {row.prompt}, token {row.position}, {error}")
    if element:
        # A row outside all prompts, such as one of a rotary table, has no number.
        of_token = f"prompt {element.prompt}, token {element.position}, "
        where = f"{of_token if element.prompt >= 0 else ''}channel {element.channel}"
        actual, expected = format_against(element.actual, element.expected)
        parts.append(f"worst element ({where}): actual {actual}, expected {expected}")
    return "; ".join(parts) or None


def _describe_compared(verdict: Verdict) -> str:
    by_level = ", ".join(
        f"{name} {level.compared:,}" for name, level in verdict.levels.items() if level.compared
    )
    unit = verdict.compared_unit
    count = (
        f"{verdict.compared:,} {unit}" if unit else format_count(verdict.compared, "tensor pair")
    )
    text = f"compared {count}"
    return f"{text} ({by_level})" if by_level else text


def _describe_diagnosis(name: str, location: Location | None) -> str:
    entry = load_diagnoses()[name]
    summary = entry.summary if location else entry.summary_without_place or entry.summary
    return f"diagnosis {name}: {summary}"


def _joined(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
