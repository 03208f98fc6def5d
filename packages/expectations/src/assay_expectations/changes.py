"""Changes between two captures: kind, size in units of noise, tokens, modules, environment; and as Markdown.

All text from records is escaped in Markdown.
Shapes: R tokens of all prompts, K kept ids and the rest.
"""

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from assay.foreign_text import escape_markdown, markdown_code
from assay.judge.levels import not_compared
from assay.verdicts import Location, Measurement, Verdict
from assay_expectations.judging import (
    LARGEST_CLEAN_RATIOS,
    Judged,
    combine,
    describe_worst,
    is_within_limits,
    judge_by,
    level_of_signature,
    token_spreads,
    tokens_of,
)
from assay_expectations.records import (
    Expectation,
    Provenance,
    content_differences,
    machine_differences,
    value_differences,
)

# noise: no further from the yardstick than clean runs. drift: further, but within the limits. break: over a
# limit. other: different content, which cannot be compared.
Kind = Literal["noise", "drift", "break", "other"]

_MAX_TOKENS_SHOWN = 5

# A module is reported if its error grew by this factor. Clean runs of four models with other threads and
# attention reached 1.81.
_MIN_GROWTH = 2.0

_LAYERS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class MovedToken:
    """A generated token, with the kept id whose log-probability moved most."""

    batch: int
    row: int
    position: int
    id: int | None
    """None for all other ids together."""
    expected: float
    actual: float
    units: float
    """Movement of all kept ids, in units of the older capture's noise."""


@dataclass(frozen=True, slots=True)
class GrownLayer:
    """A module whose relative error grew."""

    module: str
    before: float
    now: float


@dataclass(frozen=True, slots=True)
class Change:
    """The change between two captures of a model."""

    kind: Kind
    judged: Judged | None
    """The newer capture, judged by the older one's limits; None for different content."""
    moved: list[MovedToken]
    """The tokens that moved most, in descending order."""
    grown: list[GrownLayer]
    """Modules with a larger error, in the order in which they end. The first one causes the change."""
    content: list[str]
    """Differences in content."""
    environment: list[str]
    """Differences in machine, software and settings."""

    @property
    def headline(self) -> str:
        """Name the kind, with its reason unless that is the level's."""
        if self.kind == "other":
            return "other: different content, which cannot be compared"
        if self.kind != "break":
            return self.summary if self.kind == "noise" else f"drift: {self.summary}"
        first = self.grown[0].module or "(model)" if self.grown else ""
        return f"break: over OLD's limits{f', first in {first}' if first else ''}"

    @property
    def summary(self) -> str:
        """Describe the change."""
        if self.judged is None:
            return f"different content: {'; '.join(self.content)}"
        size = describe_worst(self.judged, "the older noise")
        if self.kind == "noise":
            return f"noise: {size}"
        if self.kind == "drift":
            return f"within the limits, but further than clean runs: {size}"
        return f"over a limit: {size}"


def find_change(expected: Expectation, actual: Expectation) -> Change:
    """Compare the capture `actual` with the older capture `expected`."""
    content = content_differences(expected.key.content, actual.key.content)
    signatures = (expected.signature, actual.signature)
    if not content and any(
        getattr(signatures[0], name) != getattr(signatures[1], name)
        for name in ("tokens", "top_ids")
    ):
        content.append("different tokens of the yardsticks")
    environment = list(_environment(expected, actual))
    if content:
        return Change("other", None, [], [], content, environment)
    judged = judge_by(expected, actual.signature.captured)
    moved = _moved(expected, actual, judged)
    grown = list(_grown(expected.layers, actual.layers))
    return Change(_kind_of(judged, expected), judged, moved, grown, [], environment)


def judge_pair(
    expected: Expectation, actual: Expectation
) -> tuple[Verdict, list[Measurement], Change]:
    """Judge the capture `actual` by the limits of `expected`, and describe the change."""
    change, level = find_change(expected, actual), "signature"
    if change.judged is None:
        result = not_compared("; ".join(change.content))
    else:
        facts = {"limits_origin": expected.limits_origin, "change": change.kind}
        result = level_of_signature(level, expected, change.judged, change.summary, facts)
    location = None
    if change.kind == "break" and change.grown:
        location = Location(phase="forward", module=change.grown[0].module)
    verdict, rows = combine(
        {level: result},
        change.environment,
        model={"name": ", ".join(sorted({expected.model, actual.model}))},
        reference={"run": expected.name},
        candidate={"run": actual.name},
        location=location,
        headline=change.headline,
    )
    return verdict, rows, change


def _grown(before: Mapping[str, float], now: Mapping[str, float]) -> Iterator[GrownLayer]:
    for module, error in before.items():
        # NaN counts as growth.
        if module in now and not now[module] <= _MIN_GROWTH * error:
            yield GrownLayer(module, error, now[module])


def _kind_of(judged: Judged, expected: Expectation) -> Kind:
    if not is_within_limits(judged):
        return "break"
    largest = {name: max(one[name] for one in expected.captures) for name in LARGEST_CLEAN_RATIOS}
    is_noise = all(
        judged[name].value <= max(clean, largest[name])
        for name, clean in LARGEST_CLEAN_RATIOS.items()
    )
    return "noise" if is_noise else "drift"


def _environment(expected: Expectation, actual: Expectation) -> Iterator[str]:
    yield from machine_differences(expected.key.machine, actual.key.machine)
    before, now = expected.provenance, actual.provenance
    yield from value_differences(before.versions, now.versions)
    yield from value_differences(before.torch_settings, now.torch_settings)
    yield from value_differences(_surroundings(before), _surroundings(now))


def _surroundings(provenance: Provenance) -> dict[str, object]:
    """Return the known facts, except versions and settings, that can change numbers."""
    variables = provenance.process.get("variables") or {}
    found = {
        "product": provenance.product,
        "container": provenance.container,
        "cpu": provenance.process.get("cpu"),
    } | {f"variable {name}": value for name, value in variables.items()}
    return {name: value for name, value in found.items() if value is not None}


def _moved(expected: Expectation, actual: Expectation, judged: Judged) -> list[MovedToken]:
    before_RK = tokens_of(expected.signature.captured.log_probabilities)
    now_RK = tokens_of(actual.signature.captured.log_probabilities)
    with np.errstate(invalid="ignore"):
        moved_RK = np.abs(np.where(now_RK == before_RK, 0.0, now_RK - before_RK))
    spreads_R = token_spreads(tokens_of(expected.signature.yardstick.log_probabilities))
    noise = judged["logits-error"].expected
    units_R = np.sqrt(np.mean(moved_RK**2, axis=1)) / spreads_R / noise
    units_R = np.where(np.isnan(units_R), math.inf, units_R)
    places = list(_places(expected))
    found = []
    for number in np.argsort(-units_R, kind="stable")[:_MAX_TOKENS_SHOWN]:
        if units_R[number] > 0:
            batch, row, position = places[number]
            kept = int(np.nanargmax(np.nan_to_num(moved_RK[number], nan=math.inf)))
            ids = expected.signature.top_ids[batch][row][position]
            found.append(
                MovedToken(
                    batch,
                    row,
                    position,
                    ids[kept] if kept < len(ids) else None,
                    float(before_RK[number, kept]),
                    float(now_RK[number, kept]),
                    float(units_R[number]),
                )
            )
    return found


def _places(expectation: Expectation) -> Iterator[tuple[int, int, int]]:
    """Yield batch, row and position of every token, in the order of `tokens_of`."""
    for batch, rows in enumerate(expectation.signature.spreads):
        for row, spreads in enumerate(rows):
            for position in range(len(spreads)):
                yield batch, row, position


def change_as_markdown(expected: Expectation, actual: Expectation, change: Change) -> str:
    """Format the kind of change, ratios, tokens, modules, and other differences."""
    return "\n".join(_lines(expected, actual, change)) + "\n"


def _lines(expected: Expectation, actual: Expectation, change: Change) -> Iterator[str]:
    yield f"### {escape_markdown(f'{actual.model} on {actual.provenance.run}: {change.kind}')}"
    yield ""
    yield f"{escape_markdown(change.summary[:1].upper() + change.summary[1:])}."
    if change.judged is not None:
        yield from (
            "",
            "| statistic | error | ratio to the older noise | limit |",
            "|---|---|---|---|",
        )
        for one in change.judged.values():
            mark = " **over**" if one.failed else ""
            statistic = escape_markdown(one.statistic)
            ratio = f"{one.actual:.3g} | {one.value:.3g}x{mark}"
            yield f"| {statistic} | {ratio} | {one.limit:g}x |"
    if change.moved:
        yield from ("", "Tokens that moved most (in units of the older noise):", "")
        yield "| batch, row, token | units | id | log-probability before | now |"
        yield "|---|---|---|---|---|"
        for token in change.moved:
            name = "all others" if token.id is None else escape_markdown(str(token.id))
            yield (
                f"| {token.batch}, {token.row}, {token.position} | {token.units:.3g} | {name} |"
                f" {token.expected:.6g} | {token.actual:.6g} |"
            )
        yield from _layers(expected, actual, change)
    yield from _listed("Other changes since the older capture", change.environment)
    yield from _listed("Provenance", _provenance(expected, actual))


def _layers(expected: Expectation, actual: Expectation, change: Change) -> Iterator[str]:
    """List modules with larger errors, and the command that finds the operation."""
    yield ""
    if change.grown:
        yield "Modules with a larger error than before. The first one causes the change:"
        yield from ("", "| module | relative error before | now |", "|---|---|---|")
        for layer in change.grown[:_LAYERS_SHOWN]:
            yield f"| {escape_markdown(layer.module or '(model)')} | {layer.before:.3g} | {layer.now:.3g} |"
        if (more := len(change.grown) - _LAYERS_SHOWN) > 0:
            yield f"| and {more} more | | |"
    elif expected.layers and actual.layers:
        yield "No module has a clearly larger error than before."
    else:
        yield "One of the captures has no errors of modules."
    yield ""
    words = ["assay", "check", "generate", actual.model, "--reference", "cpu/float32"]
    command = shlex.join([*words, "--candidate", actual.provenance.run])
    yield f"To find the operation: {markdown_code(command)}."


def _listed(title: str, items: Iterable[str]) -> Iterator[str]:
    found = list(items)
    if found:
        yield from ("", f"{title}:", "", *(f"- {escape_markdown(item)}" for item in found))


def _provenance(expected: Expectation, actual: Expectation) -> Iterator[str]:
    for word, one in (("before", expected), ("now", actual)):
        date = one.provenance.process.get("date", "unknown date")
        approved = one.provenance.approved_by or "nobody"
        reason = f": {one.provenance.reason}" if one.provenance.reason else ""
        yield f"{word}: {date}, {len(one.captures)} captures, approved by {approved}{reason}"
