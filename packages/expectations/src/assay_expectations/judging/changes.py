"""What changed from one capture to another: in noise units, in words, and of which kind.

Shapes: R tokens of all prompts, K kept ids and the rest.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from assay_expectations.judging.numbers import (
    CLEAN_REACH,
    JudgedSignature,
    judge_numbers,
    rows_of,
    token_spreads,
)
from assay_expectations.records import (
    Expectation,
    Provenance,
    content_differences,
    machine_differences,
    value_differences,
)

# noise: no further from the yardstick than clean runs; drift: further, and within the limits; break: over
# a limit; other: not of the same content, so that there is nothing to compare.
Kind = Literal["noise", "drift", "break", "other"]

_MOST_SHOWN = 5

# How much further from the yardstick a module has to be than before to be told: clean runs of four models with
# other threads and attention were up to 1.81 times as far.
_GROWN = 2.0


@dataclass(frozen=True, slots=True)
class MovedToken:
    """The place of a generated token, and the kept id whose log-probability moved most there.

    units: how far all kept ones of the token moved, in the noise of the older capture.
    """

    batch: int
    row: int
    position: int
    id: int | None
    expected: float
    actual: float
    units: float


@dataclass(frozen=True, slots=True)
class GrownLayer:
    """A module whose results are further from the yardstick than they were: relative errors."""

    module: str
    before: float
    now: float


@dataclass(frozen=True, slots=True)
class Change:
    """From one capture to another of the same model.

    judged: the newer one by the older one's limits; None where they cannot be compared.
    moved: those that moved furthest, the furthest first.
    grown: modules with a larger error than before, those that end first before others: the change is made
        in the first, and others inherit it.
    content, environment: what differs in what was run, and around it.
    """

    kind: Kind
    judged: JudgedSignature | None
    moved: list[MovedToken]
    grown: list[GrownLayer]
    content: list[str]
    environment: list[str]

    @property
    def summary(self) -> str:
        """In a sentence."""
        if self.judged is None:
            return f"nothing can be compared: {'; '.join(self.content)}"
        worst = self.judged.worst
        size = (
            f"{worst.ratio.statistic} {worst.ratio.actual:.3g} is {worst.ratio.value:.3g}x the noise before"
            f" (limit {worst.limit:g}x)"
        )
        if self.kind == "noise":
            return f"no more than noise: {size}"
        if self.kind == "drift":
            return f"within the limits, and further than clean runs were: {size}"
        return f"over a limit: {size}"


def find_change(expected: Expectation, actual: Expectation) -> Change:
    """What changed from the capture `expected` to `actual`."""
    content = content_differences(expected.key.content, actual.key.content)
    signatures = (expected.signature, actual.signature)
    if not content and any(
        getattr(signatures[0], name) != getattr(signatures[1], name)
        for name in ("tokens", "top_ids")
    ):
        content.append("their yardsticks chose other tokens")
    environment = list(_environment(expected, actual))
    if content:
        return Change("other", None, [], [], content, environment)
    judged = judge_numbers(
        expected.signature,
        actual.signature.captured,
        expected.key.machine.dtype,
        expected.limits,
    )
    moved = _moved(expected, actual, judged)
    grown = list(_grown(expected.layers, actual.layers))
    return Change(_kind_of(judged, expected), judged, moved, grown, [], environment)


def _grown(before: Mapping[str, float], now: Mapping[str, float]) -> Iterator[GrownLayer]:
    for module, error in before.items():
        # Written so that a NaN has grown.
        if module in now and not now[module] <= _GROWN * error:
            yield GrownLayer(module, error, now[module])


def _kind_of(judged: JudgedSignature, expected: Expectation) -> Kind:
    if not judged.passed:
        return "break"
    widest = {name: max(one[name] for one in expected.captures) for name in CLEAN_REACH}
    is_noise = all(
        judged.ratios[name] <= max(reach, widest[name]) for name, reach in CLEAN_REACH.items()
    )
    return "noise" if is_noise else "drift"


def _environment(expected: Expectation, actual: Expectation) -> Iterator[str]:
    yield from machine_differences(expected.key.machine, actual.key.machine)
    before, now = expected.provenance, actual.provenance
    yield from value_differences(before.versions, now.versions)
    yield from value_differences(before.torch_settings, now.torch_settings)
    yield from value_differences(_around(before), _around(now))


def _around(provenance: Provenance) -> dict[str, object]:
    """What may change numbers beside versions and settings; only what is known."""
    variables = provenance.process.get("variables") or {}
    found = {
        "product": provenance.product,
        "container": provenance.container,
        "cpu": provenance.process.get("cpu"),
    } | {f"variable {name}": value for name, value in variables.items()}
    return {name: value for name, value in found.items() if value is not None}


def _moved(expected: Expectation, actual: Expectation, judged: JudgedSignature) -> list[MovedToken]:
    before_RK = rows_of(expected.signature.captured.log_probabilities)
    now_RK = rows_of(actual.signature.captured.log_probabilities)
    with np.errstate(invalid="ignore"):
        moved_RK = np.abs(np.where(now_RK == before_RK, 0.0, now_RK - before_RK))
    spreads_R = token_spreads(rows_of(expected.signature.yardstick.log_probabilities))
    noise = next(
        one.ratio.expected for one in judged.judged if one.ratio.statistic == "logits-error"
    )
    units_R = np.sqrt(np.mean(moved_RK**2, axis=1)) / spreads_R / noise
    units_R = np.where(np.isnan(units_R), math.inf, units_R)
    places = list(_places(expected))
    found = []
    for number in np.argsort(-units_R, kind="stable")[:_MOST_SHOWN]:
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
    """Batch, row and position of every token, in the order of the rows of `rows_of`."""
    for batch, rows in enumerate(expectation.signature.spreads):
        for row, spreads in enumerate(rows):
            for position in range(len(spreads)):
                yield batch, row, position
