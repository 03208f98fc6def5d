"""Checks of correct variants of training, golden by golden."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from packages.core.tests.false_alarms.checked import Checked
from packages.core.tests.false_alarms.training_variants import TrainingVariant
from packages.core.tests.trials.training_trial import TrainingGroup, TrainingTrial, train
from packages.core.tests.trials.trial import run_all

# A golden and its candidates are a minute's work.
_LINE_EVERY = 2


def check_all_training(variants: Sequence[TrainingVariant], folder: Path) -> list[Checked]:
    """Check every variant against a golden of its own model, dtype and options."""
    sharing: dict[str, list[TrainingVariant]] = {}
    for variant in variants:
        sharing.setdefault(variant.golden, []).append(variant)
    # The largest first: the last ones then end at about the same time.
    groups = sorted(sharing.values(), key=len, reverse=True)
    outcomes = run_all(train, [_group(some, folder) for some in groups], _LINE_EVERY)
    checked = {
        variant.name: Checked(variant, outcome)
        for some, found in zip(groups, outcomes, strict=True)
        for variant, outcome in zip(some, found, strict=True)
    }
    return [checked[variant.name] for variant in variants]


def _group(variants: Sequence[TrainingVariant], folder: Path) -> TrainingGroup:
    first = variants[0]
    name = hashlib.sha256(first.golden.encode()).hexdigest()[:16]
    trials = tuple(
        TrainingTrial(
            variant.name,
            f"{variant.device}/{variant.dtype}",
            variant.trainer,
            variant.setup,
            dict(variant.mesh),
            variant.features,
        )
        for variant in variants
    )
    return TrainingGroup(first.train_options, first.dtype, folder / name, trials)
