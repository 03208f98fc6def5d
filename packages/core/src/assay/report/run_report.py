"""The content of a report, selected and ordered for all formats."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from assay.errors import assay_command, name_some
from assay.foreign_text import one_line, shorten
from assay.judge.explain import (
    DecidingRows,
    Explanation,
    describe_cause,
    explain_command,
    explain_verdict,
    find_coarsest_rows,
    find_deciding_rows,
    over_limit,
)
from assay.judge.wording import (
    TIE_WITH_OTHER_LOGITS,
    describe_error,
    describe_judged,
    describe_level,
    describe_location,
    describe_place,
    describe_sides,
    format_number,
    is_of_dumps,
)
from assay.runs.results import find_golden, read_measurements, read_verdict
from assay.sites import Phase
from assay.verdicts import Level, Measurement, Outcome, Suspect, Verdict

# Fields of a level that are already in the message or in columns of the ladder.
_SHOWN_ELSEWHERE = {
    "statistic", "noise_ratio", "limit", "limits_origin", "worst_element", "question", "subjects",
    "next", "measures",
}  # fmt: skip

# The commands whose failures `assay reproduce` takes.
_REPRODUCED = (("check", "generate"), ("check", "train"))

LONGEST_CELL = 120

TOP_SUSPECTS = 5  # number shown by formats without space for all

# Columns that every format aligns on the right.
NUMERIC_COLUMNS = ("compared", "ratio / limit", "resolution", "time")


@dataclass(frozen=True, slots=True, order=True)
class StageKey:
    """A stage as a line of tables and pictures, in the order of the forward pass."""

    order: int
    module: str
    phase: Phase

    @property
    def label(self) -> str:
        """Return the name in tables and pictures."""
        name = self.module or "(model)"
        return one_line(name if self.phase == "forward" else f"{name} ({self.phase})")


@dataclass(frozen=True, slots=True)
class LadderRung:
    """One level of the ladder."""

    name: str
    level: Level
    worst: Measurement | None
    """The worst judged measurement; of the failed level, the deciding one."""
    coarsest: Measurement | None = None
    """The measurement of coarsest resolution, if possible of the statistic of `worst`."""
    question: str = ""
    """The question that the level answers."""

    @property
    def cells(self) -> dict[str, str]:
        """Return the line of this level in every format, by column."""
        level, row = self.level, self.worst
        return {
            "level": one_line(self.name),
            "verdict": level.outcome_in_words,
            "compared": f"{level.compared:,}" if level.compared else "",
            "ratio / limit": ""
            if row is None or self.is_elsewhere
            else describe_judged(row.ratio, row.limit or 0.0),
            "resolution": format_number(self.coarsest.resolution) if self.coarsest else "",
            "worst": self.reason or self.error,
        }

    @property
    def is_elsewhere(self) -> bool:
        """Return True if no measurement shows the failure: tokens at a near tie, whose logits differ."""
        row = self.worst
        is_failed = self.level.verdict is Outcome.FAIL
        return is_failed and row is not None and row.ratio <= (row.limit or 0.0)

    @property
    def reason(self) -> str:
        """Return the reason of the outcome in one line; "" without one."""
        return one_line(self.level.reason or "")

    @property
    def error(self) -> str:
        """Return the worst error; "" if nothing was measured."""
        if self.is_elsewhere:
            return TIE_WITH_OTHER_LOGITS if self.name == "tokens" else ""
        return describe_error(self.worst.statistic, self.worst.actual) if self.worst else ""

    @property
    def measured(self) -> str:
        """Return the worst measurement with its place, ratio and limit in one line; "" without one."""
        row = self.worst
        if row is None or self.is_elsewhere:
            return self.error
        rank = f", rank {row.rank}" if row.rank else ""
        place = f"{one_line(row.module)}, {row.phase}, step {row.step}{rank}".removeprefix(", ")
        return f"{place}: {self.error}, {self.cells['ratio / limit']}"

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Return the other results of the level as names and values."""
        extra = self.level.model_extra or {}
        facts = {name: extra[name] for name in extra if name not in _SHOWN_ELSEWHERE}
        if self.level.reason and self.worst:
            facts["worst"] = self.error
        return _flatten(facts)


@dataclass(frozen=True)
class Report:
    """A finished run, read by `read_report`."""

    folder: Path
    verdict: Verdict
    measurements: list[Measurement] = field(default_factory=list)
    complaints: tuple[str, ...] = ()

    @cached_property
    def decided(self) -> DecidingRows:
        """Select the measurements that decided the verdict."""
        return find_deciding_rows(self.verdict, self.measurements)

    @cached_property
    def explanation(self) -> Explanation:
        """Put the verdict into words; if the golden is kept, the next command makes the failure a folder."""
        words, causes = explain_verdict(self.verdict, self.decided), explain_command(self.verdict)
        next_command = self._reproduction or words.next_command
        more = [f"its causes: {causes}"] if causes and causes != next_command else []
        return replace(words, details=(*words.details, *more), next_command=next_command)

    @property
    def command(self) -> str:
        """Return the command that repeats the run, into a new folder; "" if it is unknown."""
        words = iter(self.verdict.command)
        kept = [one for one in words if not (one == "--output" and next(words, one))]
        return shlex.join(one for one in kept if not one.startswith("--output="))

    @property
    def _reproduction(self) -> str:
        """Return the command that makes the failure a folder; "" if the run cannot be reproduced."""
        verdict = self.verdict
        is_placed = verdict.verdict is Outcome.FAIL and bool(verdict.location or verdict.suspects)
        has_golden = "--golden" in verdict.command or find_golden(self.folder) != self.folder
        is_known = is_placed and has_golden and tuple(verdict.command[1:3]) in _REPRODUCED
        return assay_command("reproduce", self.folder) if is_known else ""

    @property
    def unchecked(self) -> list[str]:
        """Return the levels of which a PASS leaves a part unchecked."""
        levels = self.verdict.levels.items()
        return [name for name, one in levels if (one.model_extra or {}).get("unchecked")]

    @property
    def what_decided(self) -> str:
        """Describe the error whose ratio decided, or return "" if no ratio did."""
        verdict = self.verdict
        if verdict.noise_ratio is None or verdict.statistic is None:
            return ""
        return describe_error(verdict.statistic, self.decided.error)

    @property
    def subject(self) -> str:
        """Name what was judged; of `assay check`, whose commands judge the same sides, also the command."""
        words, sides = self.verdict.command[1:3], describe_sides(self.verdict)
        return one_line(f"{' '.join(words)} of {sides}") if words[:1] == ["check"] else sides

    @property
    def index_cells(self) -> dict[str, str]:
        """Return the line of this run in a table of runs, by column. Long texts are cut: its message has them."""
        verdict, judged = self.verdict, ""
        what, ratio, limit = self.what_decided, verdict.noise_ratio, verdict.limit
        is_decided = bool(what) and verdict.verdict is not Outcome.NOT_COMPARED
        if is_decided and ratio is not None and limit is not None:
            judged = describe_judged(ratio, limit)
        if not judged or verdict.compared_unit:  # its levels give reasons
            what = describe_cause(verdict) or what
        return {
            "verdict": verdict.verdict.value,
            "folder": one_line(str(self.folder)),
            "run": self.subject,
            "where": describe_place(verdict.location) if verdict.location else "",
            "what": shorten(what, LONGEST_CELL),
            "ratio / limit": judged,
        }

    @cached_property
    def ladder(self) -> list[LadderRung]:
        """Return the levels, in the order of the verdict."""
        worst = self.decided.find_worst(
            (row.level, row) for row in self.measurements if row.limit is not None
        )
        if self.decided.deciding is not None:
            # The headline and the ladder report one number.
            worst[self.decided.deciding.level] = self.decided.deciding
        # Of the statistic whose ratio stands next to it, unless that sees no errors of any form.
        alike = [
            row
            for row in self.measurements
            if row.level in worst and row.statistic == worst[row.level].statistic
        ]
        coarsest = self.decided.coarsest | find_coarsest_rows(alike)
        return [
            LadderRung(
                name,
                level,
                worst.get(name),
                coarsest.get(name),
                describe_level(self.verdict, name),
            )
            for name, level in self.verdict.levels.items()
        ]

    @property
    def top_suspects(self) -> list[Suspect]:
        """Return the worst suspects, worst first, including the one that the verdict names."""
        shown, others = self.verdict.suspects[:TOP_SUSPECTS], self.verdict.suspects[TOP_SUSPECTS:]
        return shown + [one for one in others if one.location == self.verdict.location]

    def suspect_cells(self, suspects: list[Suspect]) -> list[dict[str, str]]:
        """Return the lines of `suspects` in every format, by column. The one that is located is marked."""
        named = (
            f" (named above{': first in the order of the model' if self._is_named_first else ''})"
        )
        return [
            {
                "suspect": describe_location(suspect.location)
                + (named if suspect.location == self.verdict.location else ""),
                "what": describe_error(suspect.statistic, suspect.error),
                "ratio / limit": describe_judged(suspect.noise_ratio, suspect.limit),
            }
            for suspect in suspects
        ]

    @property
    def _is_named_first(self) -> bool:
        """Return True if the place that the verdict names is not the worst, but the first of its phase that fails."""
        row = self.decided.deciding
        if row is None or self.verdict.suspects[0].location == self.verdict.location:
            return False
        judged = (one for one in self.measurements if one.limit is not None)
        failed = (one for one in judged if one.phase == row.phase and over_limit(one) > 1)
        return all(row.order <= one.order for one in failed)

    @property
    def measures(self) -> list[dict[str, str]]:
        """Return the lines of a table of values on both sides, such as metrics of tasks, by column."""
        return [
            {
                "level": one_line(name),
                **{name.replace("_", " "): _in_cell(value) for name, value in cells.items()},
            }
            for name, level in self.verdict.levels.items()
            for cells in (level.model_extra or {}).get("measures", ())
        ]

    @property
    def notes(self) -> list[str]:
        """Return the notes of the verdict, and complaints about the files."""
        return [*self.verdict.notes, *self.complaints]

    @cached_property
    def stages(self) -> dict[tuple[str, Phase], StageKey]:
        """Return the stages of the level `modules`, by module and phase."""
        first: dict[tuple[str, Phase], int] = {}
        for row in self.measurements:
            if row.level == "modules":
                key = (row.module, row.phase)
                first[key] = min(row.order, first.get(key, row.order))
        return {key: StageKey(order, *key) for key, order in first.items()}

    @property
    def judged_side(self) -> str:
        """Return the command's name for the judged side."""
        return "ACTUAL" if is_of_dumps(self.verdict) else "candidate"

    @property
    def facts(self) -> dict[str, list[tuple[str, str]]]:
        """Return model, environment and sides as names and values, without the command."""
        verdict = self.verdict
        sides = ("EXPECTED", "ACTUAL") if is_of_dumps(verdict) else ("Reference", "Candidate")
        groups = {
            "Model": verdict.model,
            sides[0]: verdict.reference,
            sides[1]: verdict.candidate,
            "Environment": verdict.environment,
        }
        flat = {title: _flatten(facts) for title, facts in groups.items() if facts}
        return {
            title: [fact for fact in facts if fact[0] != "command"] for title, facts in flat.items()
        }


def _in_cell(value: object) -> str:
    """Return a value of a measure for a table; "" for none."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else str(value)


def read_report(folder: Path) -> Report:
    """Read the run in `folder`.

    Absent measurements and a truncated last one are listed among the notes.
    Raises: UnreadableFileError if the verdict is absent or a file violates the schema.
    """
    verdict = read_verdict(folder)
    measurements, complaints = read_measurements(folder)
    return Report(folder, verdict, measurements, tuple(complaints))


# More runs with equal results are named by the first.
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class RunLine:
    """A line in a table of runs: those whose results read the same."""

    reports: list[Report]
    base: Path

    @property
    def cells(self) -> dict[str, str]:
        """Return the line in every format, by column."""
        lines = [report.index_cells for report in self.reports]
        folders = [one_line(shown_path(report.folder, self.base)) for report in self.reports]
        runs = [line["run"] for line in lines]
        num_named = len(lines) if len(lines) <= _MOST_NAMED else 1
        named = {"folder": name_some(folders, num_named), "run": name_some(runs, num_named)}
        return lines[0] | named


def list_runs(reports: Iterable[Report], base: Path = Path()) -> list[RunLine]:
    """Return the lines of a table of runs. base: as in `shown_path`."""
    alike: dict[tuple[str, ...], list[Report]] = {}
    for report in reports:
        cells = report.index_cells
        result = [cells[name] for name in cells if name not in ("folder", "run")]
        causes = [] if report.verdict.verdict is Outcome.PASS else report.explanation.details
        alike.setdefault((*result, *causes), []).append(report)
    return [RunLine(members, base) for members in alike.values()]


def shown_path(path: Path, base: Path) -> str:
    """Return a path relative to `base` if it is inside, else unchanged."""
    return str(path.relative_to(base) if path.is_relative_to(base) else path)


def _flatten(facts: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for name, value in facts.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict):
            pairs += _flatten(value, f"{path}.")
        elif isinstance(value, list):
            pairs.append((path, ", ".join(map(str, value))))
        elif isinstance(value, float):
            pairs.append((path, format_number(value)))
        else:
            pairs.append((path, str(value)))
    return pairs
