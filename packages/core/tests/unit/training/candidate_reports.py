"""Reports of candidate processes that tell nothing but what a test is about."""

from assay.training.requests import CandidateReport, FreeRun


def report(
    *steps: dict[str, str],
    saved: tuple[str, ...] = (),
    shared: tuple[list[str], ...] = (),
    taken: tuple[tuple[int, int], ...] = (),
    masks: tuple[str, ...] = (),
    **coordinates: int,
) -> CandidateReport:
    """steps: what is held after each; saved: what was changed by saving."""
    return CandidateReport(
        run={},
        free=FreeRun(held=list(steps), changed_by_saving=list(saved), masks=list(masks)),
        seen=[],
        invisible={},
        weights_different=[],
        not_in_optimizer=[],
        shared=list(shared),
        not_taken=[],
        taken=list(taken),
        coordinates=coordinates,
    )
