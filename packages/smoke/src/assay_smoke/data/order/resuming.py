"""Checks resumes in the middle of the first and of later epochs."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from assay_smoke.data.checked_code import Subject
from assay_smoke.data.order.recording import (
    Epoch,
    describe_case,
    interrupt_run,
    record_run,
    show_epoch,
)
from assay_smoke.data.properties import PropertyLog, Violation, list_numbers
from assay_smoke.data.protocols import LoaderPlan, OpenRun, ResumePoint


def judge_resumes(
    log: PropertyLog,
    name: str,
    subject: Subject,
    open_run: OpenRun,
    plan: LoaderPlan,
    by_rank: Sequence[Sequence[Epoch]],
) -> None:
    """Interrupt and resume every rank in every epoch. Judge each resume as the property `name`.

    The global generators are restored to the interruption, as checkpoints restore them. An order drawn
    from them then changes.

    by_rank: epochs of the uninterrupted run by rank.
    """
    for rank, epochs in enumerate(by_rank):
        own = replace(plan, rank=rank)
        for epoch, num_batches in _interruptions(own, epochs):
            point, states = interrupt_run(subject, open_run, own, epoch, num_batches)
            resumed = record_run(subject, open_run, own, point, states)
            log.judge(name, _find_difference(own, epochs, point, resumed))


def _interruptions(plan: LoaderPlan, epochs: Sequence[Epoch]) -> Iterator[tuple[int, int]]:
    """Yield epochs with numbers of batches seen: after the first, in the middle, before the last.

    With workers, interrupt only once, because every epoch starts new processes. Without shuffling,
    interrupt only in the middle.
    """
    if plan.num_workers:
        yield 1, len(epochs[1]) // 2
        return
    for number, epoch in enumerate(epochs):
        seen = {len(epoch) // 2}
        if plan.shuffle:
            seen |= {0 if number else 1, 1, len(epoch) - 1}
        yield from ((number, count) for count in sorted(seen) if 0 <= count < len(epoch))


def _find_difference(
    plan: LoaderPlan,
    epochs: Sequence[Epoch],
    point: ResumePoint,
    resumed: Sequence[Epoch],
) -> Violation | None:
    expected = [epochs[point.epoch][point.num_batches :], *epochs[point.epoch + 1 :]]
    if list(resumed) == expected:
        return None
    later = next(n for n, epoch in enumerate(expected) if resumed[n] != epoch)
    number = point.epoch + later
    return Violation(
        _describe(epochs, point, resumed[later], later),
        (
            f"{describe_case(plan, point)}, rank {plan.rank}",
            f"rest of epoch {number}: {show_epoch(expected[later])}",
            f"resumed:         {show_epoch(resumed[later])}",
        ),
    )


def _describe(epochs: Sequence[Epoch], point: ResumePoint, actual: Epoch, later: int) -> str:
    """Describe the resumed run, by a known mistake if one fits."""
    number = point.epoch + later
    where = f"a run resumed in epoch {point.epoch}"
    skipped = point.num_batches
    if later and skipped and actual == epochs[number][skipped:]:
        return f"{where} also skips {skipped} batches of epoch {number}"
    for other, epoch in enumerate(epochs):
        if other != number and actual == (epoch if later else epoch[skipped:]):
            return f"{where} has the order of epoch {other} in epoch {number}"
    if not later and actual == epochs[number]:
        return f"{where} restarts the epoch"
    difference = _lost_and_repeated(epochs, point, actual, later)
    return f"{where} sees other samples in epoch {number}{difference}"


def _lost_and_repeated(
    epochs: Sequence[Epoch], point: ResumePoint, actual: Epoch, later: int
) -> str:
    number = point.epoch + later
    before = [] if later else epochs[number][: point.num_batches]
    seen = Counter(sample for batch in [*before, *actual] for sample in batch)
    whole = Counter(sample for batch in epochs[number] for sample in batch)
    lost, repeated = sorted((whole - seen).elements()), sorted((seen - whole).elements())
    if not lost and not repeated:
        return ", in another order"
    parts = [
        f"{list_numbers(lost)} never" if lost else "",
        f"{list_numbers(repeated)} again" if repeated else "",
    ]
    return ": " + ", ".join(filter(None, parts))
