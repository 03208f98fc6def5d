"""Correct variants that were checked: tables of how near to its limits each came."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from assay.judge.limits import CleanRun, false_alarm_bound
from assay.verdicts import Outcome, Verdict
from packages.core.tests.trials.readings import Reading
from packages.core.tests.trials.tables import markdown_table, number


class CorrectVariant(Protocol):
    """A candidate that is correct.

    way: how it differs from the noise run; device: where it runs.
    known: why it fails although it is correct; empty for all that have to pass.
    """

    @property
    def name(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def way(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def known(self) -> str: ...


class TrialOutcome(Protocol):
    """What came of its trial.

    fingerprint: the same for two variants only if they computed the same numbers.
    """

    @property
    def verdict(self) -> Verdict: ...
    @property
    def worst(self) -> Mapping[str, Reading]: ...
    @property
    def fingerprint(self) -> str: ...


@dataclass(frozen=True)
class Checked:
    """A variant and the verdict on it."""

    variant: CorrectVariant
    outcome: TrialOutcome

    @property
    def verdict(self) -> Outcome:
        """The verdict; PASS is the only right one."""
        return self.outcome.verdict.verdict

    @property
    def clean_run(self) -> CleanRun:
        """In the form from which limits are calibrated."""
        ratios = {name: reading.ratio for name, reading in self.outcome.worst.items()}
        ratios = {name: ratio for name, ratio in ratios.items() if self._has_limit(name)}
        return CleanRun(self.variant.name, ratios)

    def _has_limit(self, statistic: str) -> bool:
        return self.outcome.worst[statistic].limit > 0


def wrong(checked: Sequence[Checked]) -> list[str]:
    """Variants that do not pass and are not known to fail, each with its verdict."""
    return [
        f"{one.variant.name}: {one.verdict} {_reason(one.outcome.verdict)}"
        for one in checked
        if one.verdict is not Outcome.PASS and not one.variant.known
    ]


def mended(checked: Sequence[Checked]) -> list[str]:
    """What passes although it is known to fail."""
    return [
        one.variant.name for one in checked if one.variant.known and one.verdict is Outcome.PASS
    ]


def _reason(verdict: Verdict) -> str:
    if verdict.location is not None:
        return (
            f"{verdict.diagnosis} at {verdict.location}: {verdict.statistic}"
            f" {number(verdict.noise_ratio)} (limit {number(verdict.limit)})"
        )
    levels = [f"{name}: {level.reason}" for name, level in verdict.levels.items() if level.reason]
    return "; ".join(levels or verdict.notes)


def largest_readings(checked: Sequence[Checked]) -> list[tuple[Reading, CorrectVariant]]:
    """For each statistic the reading nearest to its limit, and the variant that gave it."""
    largest: dict[str, tuple[Reading, CorrectVariant]] = {}
    for one in checked:
        for name, reading in one.outcome.worst.items():
            if name not in largest or reading.severity > largest[name][0].severity:
                largest[name] = reading, one.variant
    return [largest[name] for name in sorted(largest)]


def readings_table(checked: Sequence[Checked]) -> str:
    """How near to its limit each statistic came, and where."""
    head = ("statistic", "largest ratio", "limit", "ratio / limit", "at", "in")
    rows = [
        (
            reading.statistic,
            number(reading.ratio),
            number(reading.limit),
            number(reading.severity),
            f"{reading.stage}: {reading.port}",
            variant.name,
        )
        for reading, variant in largest_readings(checked)
    ]
    return markdown_table(head, rows)


def variants_table(checked: Sequence[Checked]) -> str:
    """One row for each way to run, over all models and dtypes."""
    head = ("way", "device", "runs", "failed", "nearest to its limit", "ratio / limit", "in")
    rows = []
    ways = dict.fromkeys((one.variant.way, one.variant.device) for one in checked)
    for way, device in ways:
        some = [one for one in checked if (one.variant.way, one.variant.device) == (way, device)]
        nearest = max(
            largest_readings(some), key=lambda pair: pair[0].severity, default=None
        )  # of none that came to a verdict there is none
        failed = sum(one.verdict is not Outcome.PASS for one in some)
        reported = ("", "", "")
        if nearest is not None:
            reading, variant = nearest
            name = f"{variant.model} {variant.dtype}"
            reported = reading.statistic, number(reading.severity), name
        rows.append((way, device, str(len(some)), str(failed), *reported))
    return markdown_table(head, rows)


def totals(checked: Sequence[Checked]) -> str:
    """How many failed, and the bound that follows for the rate of false alarms."""
    known = [one for one in checked if one.variant.known]
    others = [one for one in checked if not one.variant.known]
    failed = [one for one in others if one.verdict is not Outcome.PASS]
    text = f"Of {len(others)} correct variants {len(failed)} do not pass."
    distinct = len({one.outcome.fingerprint for one in others})
    if not failed and others:
        bound = false_alarm_bound(distinct)
        text += (
            f" {distinct} of them have numbers of their own: at 95% fewer than {bound:.1%} of such"
            " runs would fail (rule of three)."
        )
    if known:
        text += f"\n\n{len(known)} more are known to fail although they are correct:\n"
        text += "\n".join(f"- {one.variant.name}: {one.variant.known}" for one in known)
    return text
