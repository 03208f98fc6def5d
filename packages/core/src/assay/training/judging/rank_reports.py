"""Merges the reports of several ranks into one."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from assay.comparing.coverage import Usage
from assay.training.processes.trainer_report import FreeRun, TrainerReport
from assay.training.replay.observing.update_watch import MovedElements
from assay.training.state.precision import KeptPrecision


def merge_reports(reports: Sequence[TrainerReport]) -> TrainerReport:
    """Return one report for all ranks: an error on one rank is an error of the run."""
    first = reports[0]
    traits, models = [one.traits for one in reports], [one.model for one in reports]
    replays, losses = [one.replay for one in reports], [one.loss for one in reports]
    gradients, optimizers = [r.gradients for r in reports], [r.optimizer for r in reports]
    update = {
        "free": _merge_runs([report.free for report in reports]),
        "traits": replace(
            first.traits,
            invisible={k: v for one in traits for k, v in one.invisible.items()},
            **_unions(traits, "partial_modules", "unmeasured", "notes"),
        ),
        "model": replace(
            first.model,
            shared=_common(models, "shared"),
            **_unions(models, "weights_different", "adapter_start"),
        ),
        "replay": replace(
            first.replay,
            seen=_common(replays, "seen"),
            # A rank whose share is a single row has nothing to pack.
            unapplied=_common(replays, "unapplied"),
            usage=Usage.of_ranks([one.usage for one in replays]),
            **_unions(replays, "packed", "not_loaded", "changed_by_skipping"),
        ),
        "loss": replace(first.loss, **_unions(losses, "logit_gradients", "labels", "scaled_steps")),
        "gradients": replace(
            first.gradients,
            drew_in_backward=any(one.drew_in_backward for one in gradients),
            errors_of_sums=_worst([one.errors_of_sums for one in gradients]),
            sharded_gradients=sum(one.sharded_gradients for one in gradients),
            narrow_gradients=sum(one.narrow_gradients for one in gradients),
        ),
        "optimizer": replace(
            first.optimizer,
            moved=MovedElements(
                sum(one.moved.num_expected for one in optimizers),
                sum(one.moved.num_moved for one in optimizers),
            ),
            **_unions(optimizers, "not_in_optimizer", "unexpectedly_trained"),
        ),
    }
    return first.model_copy(update=update)


def _merge_runs(runs: Sequence[FreeRun]) -> FreeRun:
    """Return the run of the first rank, with the errors of all ranks."""
    problems = [run.problem for run in runs if run.problem is not None]
    kept = [run.kept for run in runs if run.kept is not None]
    names = [one.name for one in fields(KeptPrecision)]
    update = {
        "problem": problems[0] if problems else None,
        "kept": KeptPrecision(**_unions(kept, *names)) if kept else None,
    }
    update |= _unions(
        runs, "saved", "settings", "changed_by_saving", "not_restored", "ended_otherwise", "notes"
    )
    return runs[0].model_copy(update=update)


def _worst(errors: Sequence[Mapping[str, float]]) -> dict[str, float]:
    worst: dict[str, float] = {}
    for of_rank in errors:
        for name, error in of_rank.items():
            worst[name] = max(error, worst.get(name, 0.0))
    return worst


def _common(items: Sequence[Any], name: str) -> list[Any]:
    return [v for v in getattr(items[0], name) if all(v in getattr(one, name) for one in items)]


def _unions(items: Sequence[Any], *names: str) -> dict[str, Any]:
    """Return for each name the values of all items' lists of that name, without repetitions."""
    found: dict[str, Any] = {name: [] for name in names}
    for name, values in found.items():
        for item in items:
            values += [value for value in getattr(item, name) if value not in values]
    return found
