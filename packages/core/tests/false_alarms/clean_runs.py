"""Checks of correct variants, and the largest ratios that they gave."""

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from assay.comparing.calibration import CleanRun, false_alarm_bound
from assay.models import resolve_model
from assay.verdicts import Outcome as Said
from packages.core.tests.false_alarms.variants import WIDE_WINDOW, Variant
from packages.core.tests.trials.tables import markdown_table, number
from packages.core.tests.trials.trial import (
    Golden,
    Outcome,
    Reading,
    Trial,
    capture,
    hold,
    run_all,
)


@dataclass(frozen=True)
class Checked:
    """A variant and what the check said of it."""

    variant: Variant
    outcome: Outcome

    @property
    def said(self) -> Said:
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


def check_all(variants: Sequence[Variant], folder: Path) -> Iterator[Checked]:
    """Check every variant against a golden of its own model, dtype and inputs."""
    models = {variant.model: variant.model for variant in variants}
    if WIDE_WINDOW in models:
        models[WIDE_WINDOW] = str(make_wide_window(folder / WIDE_WINDOW))
    goldens = {
        _key(variant): Golden(
            models[variant.model],
            variant.dtype,
            folder / _file_name(_key(variant)),
            variant.input_options,
        )
        for variant in variants
    }
    run_all(capture, list(goldens.values()))
    trials = [
        Trial(
            variant.name,
            goldens[_key(variant)],
            f"{variant.device}/{variant.dtype}",
            folder / _file_name(variant.name),
            variant.setup,
            variant.options,
        )
        for variant in variants
    ]
    for variant, outcome in zip(variants, run_all(hold, trials), strict=True):
        yield Checked(variant, outcome)


def make_wide_window(folder: Path) -> Path:
    """The Mistral recipe with a window that no text reaches."""
    recipe = resolve_model("micro:mistral").recipe
    assert recipe is not None
    shutil.copytree(recipe.folder, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"sliding_window": 4096}), encoding="utf-8")
    return folder


def largest_readings(checked: Sequence[Checked]) -> list[tuple[Reading, Variant]]:
    """For each statistic the reading nearest to its limit, and the variant that gave it."""
    largest: dict[str, tuple[Reading, Variant]] = {}
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
        reading, variant = max(largest_readings(some), key=lambda pair: pair[0].severity)
        failed = sum(one.said is not Said.PASS for one in some)
        name = f"{variant.model} {variant.dtype}"
        rows.append(
            (
                way, device, str(len(some)), str(failed),
                reading.statistic, number(reading.severity), name,
            )
        )  # fmt: skip
    return markdown_table(head, rows)


def totals(checked: Sequence[Checked]) -> str:
    """How many failed, and what that says of others."""
    known = [one for one in checked if one.variant.known]
    others = [one for one in checked if not one.variant.known]
    failed = [one for one in others if one.said is not Said.PASS]
    text = f"Of {len(others)} correct variants {len(failed)} do not pass."
    if not failed:
        bound = false_alarm_bound(len(others))
        text += f" At 95% fewer than {bound:.1%} of such runs would (rule of three)."
    if known:
        text += f"\n\n{len(known)} more are known to fail although they are correct:\n"
        text += "\n".join(f"- {one.variant.name}: {one.variant.known}" for one in known)
    return text


def _key(variant: Variant) -> str:
    return f"{variant.model} {variant.dtype} {variant.inputs}"


def _file_name(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]
