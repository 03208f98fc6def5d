"""The result of a command: a verdict with one of three outcomes, and its measurements."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from assay.sites import Phase
from assay.statistics import Statistic

SCHEMA = 1


class Outcome(StrEnum):
    """The outcome of a verdict, and of each of its levels, the worst last."""

    PASS = "PASS"  # noqa: S105 - not a password
    NOT_COMPARED = "NOT_COMPARED"
    FAIL = "FAIL"

    @property
    def exit_code(self) -> int:
        """Return the exit code of the command line for this outcome."""
        return {Outcome.PASS: 0, Outcome.FAIL: 1, Outcome.NOT_COMPARED: 3}[self]

    @property
    def severity(self) -> int:
        """Return the place in the order of the members."""
        return list(Outcome).index(self)


def _to_json(value: object) -> Any:  # noqa: ANN401 - a JSON value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _to_json(item) for key, item in value.items()}
    return value


def _from_json(value: object) -> object:
    if isinstance(value, str) and value in ("inf", "-inf", "nan"):
        return float(value)
    if isinstance(value, dict):
        return {key: _from_json(item) for key, item in value.items()}
    return value


# JSON has neither infinity nor NaN: they become the strings "inf", "-inf" and "nan".
Number = Annotated[float, PlainSerializer(_to_json, return_type=float | str, when_used="json")]

Diagnosis = Literal[
    "module-error", "non-finite", "inputs-differ", "weight-mismatch", "sampler", "loss-scale",
    "missing-reduction", "untied-parameters", "optimizer-update", "clip-norm",
    "frozen-parameters", "rng-state", "replica-divergence", "checkpoint-mismatch",
    "adapter-mismatch", "nondeterminism", "stale", "near-tie", "representation-difference",
    "below-resolution",
]  # fmt: skip


class Record(BaseModel):
    """Base of all records that are written as JSON: unknown keys are an error."""

    model_config = ConfigDict(extra="forbid")


class Location(Record):
    """The place of an error."""

    phase: Phase
    step: int = 0
    rank: int = 0
    module: str | None = None
    op: str | None = None
    parameter: str | None = None


class TokenPosition(Record):
    """A token of a prompt and its continuation."""

    prompt: int
    position: int
    phase: Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class NextStep:
    """Purpose and command of a step after a verdict; "" for one that it lacks."""

    purpose: str = ""
    command: str = ""

    def __str__(self) -> str:
        """Return the purpose, and the command on a line of its own, to be copied."""
        return ":\n  ".join(filter(None, (self.purpose, self.command)))


class Suspect(Record):
    """A stage over its limit. Suspects are ranked by ratio / limit, worst first."""

    location: Location
    statistic: str
    error: Number | None = None
    """The candidate's error behind `noise_ratio`; None in older files."""
    noise_ratio: Number
    limit: Number


class Level(Record):
    """The result of one level of a check."""

    model_config = ConfigDict(extra="allow")

    verdict: Outcome | None
    """Null if the level was not run, or ran but is not judged."""
    reason: str | None = None
    """The cause in words. Required of a level that was not compared or not run."""
    compared: int = 0

    @property
    def outcome_in_words(self) -> str:
        """Return the verdict; without one, if the level ran."""
        return self.verdict.value if self.verdict else "not judged" if self.compared else "not run"

    @model_validator(mode="before")
    @classmethod
    def _read_details(cls, data: object) -> object:
        return _from_json(data)

    @model_validator(mode="after")
    def _require_reason(self) -> Self:
        if self.verdict in (None, Outcome.NOT_COMPARED) and not self.reason:
            raise ValueError(f"a level that is {self.verdict or 'not run'} needs a reason")
        return self

    @model_serializer(mode="wrap", when_used="json")
    def _write_details(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        fields: dict[str, object] = write(self)
        return fields | {key: _to_json(value) for key, value in (self.model_extra or {}).items()}


class Unmatched(Record):
    """Tensors without a partner. Expected ones forbid PASS; extra actual ones are only listed."""

    expected: list[str] = Field(default_factory=list)
    actual: list[str] = Field(default_factory=list)


class Coverage(Record):
    """Coverage of the model by a verdict. Only modules that own parameters count."""

    modules: int
    """Number of modules in the reference's model."""
    modules_run: int
    """Number of modules that ran there and whose work was compared in the candidate."""
    candidate_modules: int | None = None
    """Number of modules in the candidate's model; null if it could not be watched."""
    candidate_modules_run: int | None = None
    """Number of modules that ran there, without modules that other code replaces."""
    not_run: list[str] = Field(default_factory=list)
    """Paths of modules of either model that did not affect a compared value."""
    not_run_parts: dict[str, int] = Field(default_factory=dict)
    """The topmost modules that did not run at all, each with its number of modules."""
    unused_parameters: list[str] = Field(default_factory=list)
    """Parameters of modules that ran, whose values no operation read (training: no gradient)."""
    other_uses: dict[str, str] = Field(default_factory=dict)
    """Parameters that no operation can read in this check, each with its use: "in training", "with" an argument that
    no check gives, or "by no code"."""
    unrouted_experts: list[str] = Field(default_factory=list)
    """Experts that computed no token: path of their group and number, `mlp.experts.3`."""
    equal_rows: list[str] = Field(default_factory=list)
    """Position ids whose rows never differed, so that their combination is untested."""
    cache_slots: int = 0
    """Positions that were written to caches, padding included."""
    cache_slots_read: int = 0
    """Written cache positions that a later call could read."""
    allowed: list[str] = Field(default_factory=list)
    """The GLOBs of --allow-unused. Matching parts and their children may stay uncompared."""
    unmatched_globs: dict[str, list[str]] = Field(default_factory=dict)
    """GLOBs that match no uncompared part; for those that match no name, the nearest names."""

    @property
    def gaps(self) -> list[str]:
        """Return all uncompared parts."""
        return [*self.not_run, *self.unused_parameters, *self.unrouted_experts]

    @property
    def forbidden_gaps(self) -> list[str]:
        """Return the uncompared parts that no GLOB allows."""
        return [name for name in self.gaps if not any(is_part_of(name, g) for g in self.allowed)]

    @property
    def outcome(self) -> Outcome:
        """Return NOT_COMPARED if a required part, or every part, was not compared."""
        is_empty = not self.modules_run
        return Outcome.NOT_COMPARED if is_empty or self.forbidden_gaps else Outcome.PASS


def is_part_of(name: str, glob: str) -> bool:
    """Return True if `glob` matches the path `name` or that of an enclosing module.

    >>> is_part_of("model.visual.blocks.1.mlp.fc1", "model.vis*")
    True
    """
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:count]), glob) for count in range(1, len(parts) + 1))


class Verdict(Record):
    """Schema 1 of verdict.json."""

    schema_: int = Field(default=SCHEMA, alias="schema")
    verdict: Outcome
    command: list[str] = Field(default_factory=list)
    environment: dict[str, Any] = Field(default_factory=dict)
    model: dict[str, Any] = Field(default_factory=dict)
    reference: dict[str, Any] = Field(default_factory=dict)
    candidate: dict[str, Any] = Field(default_factory=dict)
    levels: dict[str, Level] = Field(default_factory=dict)
    first_bad_token: TokenPosition | None = None
    location: Location | None = None
    suspects: list[Suspect] = Field(default_factory=list)
    diagnosis: Diagnosis | None = None
    notes: list[str] = Field(default_factory=list)
    noise_ratio: Number | None = None
    limit: Number | None = None
    statistic: str | None = None
    resolution: Number | None = None
    compared: int = 0
    compared_unit: str | None = None
    """The unit of `compared` unless it counts tensor pairs, such as "items"."""
    unmatched: Unmatched = Field(default_factory=Unmatched)
    headline: str | None = None
    """The first sentence, if the default text about tensors of two runs does not fit."""
    next_steps: list[NextStep] = Field(default_factory=list)
    """Steps to take instead of `assay explain DIAGNOSIS`."""
    files: dict[str, str] = Field(default_factory=dict)
    """Digests of the files of the run that belong to the verdict, by name."""
    coverage: Coverage | None = None
    """Null if the command does not run a model."""
    digest: str | None = Field(default=None, exclude=True)
    """Digest of the content of verdict.json, which `assay.runs.results.read_verdict` verifies."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    @property
    def passed(self) -> bool:
        """Return True if everything that was expected was compared and agrees."""
        return self.verdict is Outcome.PASS

    def __bool__(self) -> bool:
        """Return True if it passed."""
        return self.passed

    def to_json(self) -> str:
        """Return the text of verdict.json."""
        return self.model_dump_json(by_alias=True, indent=1)


class Measurement(Record):
    """One row of measurements.jsonl: one statistic at one stage, or at one token of it."""

    level: str
    module: str
    port: str
    phase: Phase = "forward"
    step: int = 0
    rank: int = 0
    order: int = 0
    """Position of the stage in the forward pass."""
    statistic: str
    actual: Number
    """Error of the candidate against the yardstick."""
    expected: Number
    """Error of the noise run against the yardstick; at least the smallest noise in a row with a limit."""
    ratio: Number
    """actual / max(expected, smallest noise), as it is judged."""
    limit: Number | None = None
    prompt: int | None = None
    position: int | None = None

    @property
    def resolution(self) -> float:
        """Return the relative error above which a judged row fails."""
        floor = self.actual / self.ratio if 0 < self.ratio < math.inf else 0.0
        return (self.limit or 0.0) * max(self.expected, floor)


@dataclass(frozen=True, slots=True)
class Ratio:
    """One statistic at one place: the error of the candidate, divided by that of a healthy run."""

    statistic: Statistic
    actual: float
    """Error of the candidate, as it is judged."""
    expected: float
    """Error of the noise run, in the same unit: an error above limit * expected fails."""
    limit: float = math.nan
    """NaN until it is judged."""

    def judged(self, limit: float) -> Self:
        """Return the ratio with its limit."""
        return replace(self, limit=limit)

    @property
    def value(self) -> float:
        """Return the ratio of the two errors; inf if the candidate's error is not finite."""
        if not math.isfinite(self.actual):
            return math.inf
        if self.actual == 0:
            return 0.0
        return self.actual / self.expected if self.expected > 0 else math.inf

    @property
    def severity(self) -> float:
        """Return ratio / limit; inf for unequal values that must be equal.

        Raises: ValueError before the ratio is judged: it must not count as one within its limit.
        """
        if math.isnan(self.limit):
            raise ValueError(f"the ratio of {self.statistic} has no limit")
        value = self.value
        if self.limit == 0:
            return math.inf if value > 0 else 0.0
        return value / self.limit

    @property
    def failed(self) -> bool:
        """Return True if the ratio is over the limit."""
        return self.severity > 1

    @property
    def resolution(self) -> float:
        """Return the relative error above which the ratio fails."""
        return self.limit * self.expected

    def measurement(self, level: str, port: str, module: str = "", **place: Any) -> Measurement:  # noqa: ANN401
        """Make the row of measurements.jsonl. place: more columns that locate it."""
        return Measurement(
            level=level, module=module, port=port, statistic=self.statistic, actual=self.actual,
            expected=self.expected, ratio=self.value, limit=self.limit, **place,
        )  # fmt: skip

    def suspect(self, location: Location) -> Suspect:
        """Make the entry of a verdict's suspects."""
        return Suspect(
            location=location, statistic=self.statistic, error=self.actual,
            noise_ratio=self.value, limit=self.limit,
        )  # fmt: skip


def overall_outcome(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the worst outcome, or NOT_COMPARED for an empty list."""
    return max(outcomes, key=lambda one: one.severity, default=Outcome.NOT_COMPARED)


def find_contradiction(verdict: Verdict) -> str | None:
    """Recompute the outcome of a verdict from its parts.

    Returns: a description of the contradiction; None if they agree.
    """
    outcome = verdict.verdict
    judged = [level.verdict for level in verdict.levels.values() if level.verdict is not None]
    of_levels = overall_outcome(judged)
    # Parts without a partner are uncompared, even if every level passes.
    has_gaps = outcome is Outcome.NOT_COMPARED and of_levels is Outcome.PASS
    if verdict.levels and outcome is not of_levels and not has_gaps:
        return f"the verdict is {outcome}, and its levels amount to {of_levels}"
    if outcome is Outcome.PASS and verdict.unmatched.expected:
        return f"the verdict is PASS, and {verdict.unmatched.expected[0]} has no partner"
    if outcome is Outcome.PASS and verdict.coverage and verdict.coverage.forbidden_gaps:
        return f"the verdict is PASS, and {verdict.coverage.forbidden_gaps[0]} was not compared"
    ratio, limit = verdict.noise_ratio, verdict.limit
    if outcome is Outcome.PASS and ratio is not None and limit is not None and not ratio <= limit:
        return f"the verdict is PASS, and its noise ratio {ratio:.3g} is over the limit {limit:.3g}"
    return None
