"""Reports of candidate processes that tell nothing but what a test is about."""

from dataclasses import fields
from typing import Any, Literal

from assay.training.protocol import TrainerTraits
from assay.training.reports import (
    FreeRun,
    GradientFindings,
    HeldPart,
    ModelReport,
    ReplayFindings,
    StateValue,
    TrainerReport,
)

_PARTS = {
    "traits": TrainerTraits, "model": ModelReport, "replay": ReplayFindings,
    "gradients": GradientFindings,
}  # fmt: skip


def trainer_report(free: FreeRun, **facts: Any) -> TrainerReport:
    """A report; each fact goes into the part that has a field of its name."""
    parts: dict[str, Any] = {
        part: kind(**{one.name: facts.pop(one.name) for one in fields(kind) if one.name in facts})
        for part, kind in _PARTS.items()
    }
    given: dict[str, Any] = {"run": {}, "free": free}
    return TrainerReport(**given | parts | facts)


def report(
    *steps: dict[HeldPart, str],
    saved: tuple[StateValue, ...] = (),
    shared: tuple[list[str], ...] = (),
    micro_batches_run: tuple[tuple[int, int], ...] = (),
    masks: tuple[str, ...] = (),
    dropout_masks: Literal["own", "shared"] | None = None,
    **coordinates: int,
) -> TrainerReport:
    """steps: what is held after each; saved: what was changed by saving."""
    return trainer_report(
        FreeRun(
            held=[list(held.items()) for held in steps],
            changed_by_saving=list(saved),
            masks=list(masks),
        ),
        shared=list(shared),
        micro_batches_run=list(micro_batches_run),
        coordinates=coordinates,
        dropout_masks=dropout_masks,
    )
