"""Checks of correct variants of generation."""

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from assay.models import resolve_model
from packages.core.tests.false_alarms.architectures import is_tiny, make_tiny
from packages.core.tests.false_alarms.checked import Checked
from packages.core.tests.false_alarms.variants import WIDE_WINDOW, Variant
from packages.core.tests.trials.trial import Golden, Trial, capture, hold, run_all


def check_all(variants: Sequence[Variant], folder: Path) -> Iterator[Checked]:
    """Check every variant against a golden of its own model, dtype and inputs."""
    models = {variant.model: variant.model for variant in variants}
    if WIDE_WINDOW in models:
        models[WIDE_WINDOW] = str(make_wide_window(folder / WIDE_WINDOW))
    for model in filter(is_tiny, list(models)):
        models[model] = str(make_tiny(model, folder / _file_name(model)))
    goldens = {
        golden_key(variant): Golden(
            models[variant.model],
            variant.dtype,
            folder / _file_name(golden_key(variant)),
            variant.input_options,
        )
        for variant in variants
    }
    run_all(capture, list(goldens.values()))
    trials = [
        Trial(
            variant.name,
            goldens[golden_key(variant)],
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


def golden_key(variant: Variant) -> str:
    """The same for all that share a golden."""
    return f"{variant.model} {variant.dtype} {variant.inputs}"


def _file_name(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]
