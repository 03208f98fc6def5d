"""The content of a report, for all formats. It selects and orders; no number is computed here."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from assay.comparing.deciding_rows import find_deciding_rows, over_limit
from assay.comparing.explain import Explanation, explain_verdict
from assay.comparing.numerals import format_number
from assay.comparing.phrases import LEVEL_QUESTIONS, describe_stage
from assay.errors import UsageError
from assay.sites import Phase
from assay.verdicts import Level, Measurement, Suspect, Verdict

VERDICT_FILE = "verdict.json"
MEASUREMENTS_FILE = "measurements.jsonl"

# Fields of a level that are already in the message or in columns of the ladder.
_SHOWN_ELSEWHERE = {"statistic", "noise_ratio", "limit", "limits_origin", "worst_element"}

TOP_SUSPECTS = 5  # number shown by formats without space for all


class UnreadableRunError(UsageError):
    """A folder without the files of a finished run, or with damaged ones."""

    @classmethod
    def absent(cls, folder: Path) -> Self:
        """`folder` has no verdict."""
        return cls(f"{folder} holds no {VERDICT_FILE}: it is not the folder of a finished run")

    @classmethod
    def damaged(cls, path: Path, line: int | None, cause: Exception) -> Self:
        """`path` (at `line`, if it has several records) violates the schema."""
        where = f"{path}, line {line}" if line else str(path)
        first = cause.errors()[0] if isinstance(cause, ValidationError) else None
        field_path = ".".join(map(str, first["loc"])) if first else ""
        why = f"{field_path}: {first['msg']}".removeprefix(": ") if first else str(cause)
        return cls(f"{where} cannot be read: {why}")


@dataclass(frozen=True, slots=True, order=True)
class StageKey:
    """A stage as a line of tables and pictures; `order` is that of the forward pass."""

    order: int
    module: str
    phase: Phase

    @property
    def label(self) -> str:
        """The name in tables and pictures."""
        return describe_stage(self.module, self.phase)


@dataclass(frozen=True, slots=True)
class LadderRung:
    """One level of the ladder and its worst judged measurement."""

    name: str
    level: Level
    worst: Measurement | None

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The other results of the level, as names and values."""
        extra = self.level.model_extra or {}
        return _flatten({name: extra[name] for name in extra if name not in _SHOWN_ELSEWHERE})


@dataclass(frozen=True)
class Report:
    """A finished run, from `read_report`."""

    folder: Path
    verdict: Verdict
    measurements: list[Measurement] = field(default_factory=list)
    complaints: tuple[str, ...] = ()

    @cached_property
    def explanation(self) -> Explanation:
        """The verdict in words."""
        evidence = find_deciding_rows(self.verdict, self.measurements)
        return explain_verdict(self.verdict, evidence)

    @cached_property
    def ladder(self) -> list[LadderRung]:
        """The levels, lowest first."""
        worst: dict[str, Measurement] = {}
        for row in self.measurements:
            if row.limit is None:
                continue
            known = worst.get(row.level)
            if known is None or over_limit(row) > over_limit(known):
                worst[row.level] = row
        known_order = list(LEVEL_QUESTIONS)
        levels = sorted(
            self.verdict.levels.items(),
            key=lambda item: known_order.index(item[0]) if item[0] in known_order else math.inf,
        )
        return [LadderRung(name, level, worst.get(name)) for name, level in levels]

    @property
    def top_suspects(self) -> list[Suspect]:
        """The worst suspects, worst first."""
        return self.verdict.suspects[:TOP_SUSPECTS]

    @property
    def notes(self) -> list[str]:
        """The notes of the verdict, and complaints about the files."""
        return [*self.verdict.notes, *self.complaints]

    @cached_property
    def stages(self) -> dict[tuple[str, Phase], StageKey]:
        """Every stage of the modules level, by module and phase."""
        first: dict[tuple[str, Phase], int] = {}
        for row in self.measurements:
            if row.level == "modules":
                key = (row.module, row.phase)
                first[key] = min(row.order, first.get(key, row.order))
        return {key: StageKey(order, *key) for key, order in first.items()}

    @property
    def facts(self) -> dict[str, list[tuple[str, str]]]:
        """Model, environment and sides as names and values; the command is shown separately."""
        verdict = self.verdict
        groups = {
            "Model": verdict.model,
            "Reference": verdict.reference,
            "Candidate": verdict.candidate,
            "Environment": verdict.environment,
        }
        flat = {title: _flatten(facts) for title, facts in groups.items() if facts}
        return {
            title: [fact for fact in facts if fact[0] != "command"] for title, facts in flat.items()
        }


def read_report(folder: Path) -> Report:
    """Read the run in `folder`.

    Absent measurements and a truncated last one are listed among the notes.
    Raises: UnreadableRunError if there is no verdict, or a file violates the schema.
    """
    path = folder / VERDICT_FILE
    try:
        verdict = Verdict.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise UnreadableRunError.absent(folder) from None
    except ValidationError as error:
        raise UnreadableRunError.damaged(path, None, error) from None
    measurements, complaints = _read_measurements(folder / MEASUREMENTS_FILE)
    return Report(folder, verdict, measurements, tuple(complaints))


def _read_measurements(path: Path) -> tuple[list[Measurement], list[str]]:
    if not path.is_file():
        return [], [f"{path.name} is absent: tables and pictures that are drawn from it are empty"]
    rows: list[Measurement] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                rows.append(Measurement.model_validate_json(line))
            except ValidationError as error:
                if not line.endswith(b"\n"):
                    return rows, [f"{path.name} was cut short after {len(rows):,} measurements"]
                raise UnreadableRunError.damaged(path, number, error) from None
    return rows, []


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
