"""Reports of several ranks as one."""

from collections.abc import Mapping, Sequence
from typing import Any

from assay.comparing.coverage import Usage
from assay.training.processes.requests import CandidateReport, FreeRun, KeptPrecision

# What goes wrong on one rank has gone wrong.
_UNITED = (
    "weights_different", "not_in_optimizer", "unexpectedly_trained", "adapter_start", "not_loaded",
    "logit_gradients", "partial_modules", "unmeasured",
    "labels", "scaled_steps", "changed_by_skipping", "packed", "trainer_notes",
)  # fmt: skip

_COUNTS = ("sharded_gradients", "narrow_gradients", "updates_expected", "updates_made")

_UNITED_OF_RUNS = (
    "saved", "settings", "changed_by_saving", "not_restored", "ended_otherwise", "notes",
)  # fmt: skip


def merge_reports(reports: Sequence[CandidateReport]) -> CandidateReport:
    """One report for all ranks; a phase was seen if every rank has shown it."""
    first = reports[0]
    update: dict[str, Any] = {name: _union(reports, name) for name in _UNITED}
    update |= {
        "errors_of_sums": _worst([report.errors_of_sums for report in reports]),
        **{name: sum(getattr(report, name) for report in reports) for name in _COUNTS},
        "free": _merge_runs([report.free for report in reports]),
        "shared": [names for names in first.shared if all(names in one.shared for one in reports)],
        # A rank whose share is a single row has nothing to pack.
        "unapplied": [
            name for name in first.unapplied if all(name in r.unapplied for r in reports)
        ],
        "seen": [phase for phase in first.seen if all(phase in one.seen for one in reports)],
        "invisible": {k: v for report in reports for k, v in report.invisible.items()},
        "usage": Usage.of_ranks([report.usage for report in reports]),
        "drew_in_backward": any(report.drew_in_backward for report in reports),
    }
    return first.model_copy(update=update)


def _merge_runs(runs: Sequence[FreeRun]) -> FreeRun:
    """The run of the first rank, with what went wrong on any."""
    problems = [run.problem for run in runs if run.problem is not None]
    update: dict[str, Any] = {name: _union(runs, name) for name in _UNITED_OF_RUNS}
    kept = [run.kept for run in runs if run.kept is not None]
    if kept:
        fields = KeptPrecision.model_fields
        update["kept"] = KeptPrecision(**{name: _union(kept, name) for name in fields})
    return runs[0].model_copy(update=update | {"problem": problems[0] if problems else None})


def _worst(errors: Sequence[Mapping[str, float]]) -> dict[str, float]:
    worst: dict[str, float] = {}
    for of_rank in errors:
        for name, error in of_rank.items():
            worst[name] = max(error, worst.get(name, 0.0))
    return worst


def _union(items: Sequence[Any], name: str) -> list[Any]:
    found: list[Any] = []
    for item in items:
        found += [value for value in getattr(item, name) if value not in found]
    return found
