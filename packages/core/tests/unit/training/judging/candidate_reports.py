"""Reports of candidate processes that tell nothing but what a test is about."""

from typing import Literal

from assay.training.processes.requests import CandidateReport, FreeRun
from assay.training.state.records import HeldPart, StateValue


def report(
    *steps: dict[HeldPart, str],
    saved: tuple[StateValue, ...] = (),
    shared: tuple[list[str], ...] = (),
    micro_batches_run: tuple[tuple[int, int], ...] = (),
    masks: tuple[str, ...] = (),
    dropout_masks: Literal["own", "shared"] | None = None,
    **coordinates: int,
) -> CandidateReport:
    """steps: what is held after each; saved: what was changed by saving."""
    return CandidateReport(
        run={},
        free=FreeRun(
            held=[list(held.items()) for held in steps],
            changed_by_saving=list(saved),
            masks=list(masks),
        ),
        seen=[],
        invisible={},
        weights_different=[],
        not_in_optimizer=[],
        shared=list(shared),
        not_loaded=[],
        micro_batches_run=list(micro_batches_run),
        coordinates=coordinates,
        dropout_masks=dropout_masks,
    )
