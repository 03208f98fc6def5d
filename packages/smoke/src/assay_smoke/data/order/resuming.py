"""Resume in the middle of an epoch: the first, and any later one."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from assay_smoke.data.order.recording import (
    Epoch,
    describe_case,
    interrupt_run,
    record_run,
    show_epoch,
)
from assay_smoke.data.properties import PropertyLog, Wrong, listed
from assay_smoke.data.protocols import LoaderPlan, OpenRun, ResumePoint
from assay_smoke.data.running_code import Subject


def judge_resumes(
    log: PropertyLog,
    name: str,
    subject: Subject,
    open_run: OpenRun,
    plan: LoaderPlan,
    by_rank: Sequence[Sequence[Epoch]],
) -> None:
    """Interrupt every rank in every epoch, resume it, and judge it as the property `name`.

    The global generators are set back to their states of the interruption, as checkpoints restore them:
    an order that is drawn from them is another then.

    by_rank: the epochs of the uninterrupted run, for each rank.
    """
    for rank, epochs in enumerate(by_rank):
        own = replace(plan, rank=rank)
        for epoch, num_batches in _interruptions(own, epochs):
            point, states = interrupt_run(subject, open_run, own, epoch, num_batches)
            resumed = record_run(subject, open_run, own, point, states)
            log.judge(name, _find_difference(own, epochs, point, resumed))


def _interruptions(plan: LoaderPlan, epochs: Sequence[Epoch]) -> Iterator[tuple[int, int]]:
    """Epochs, and the batches seen before: after the first, in the middle, before the last.

    With workers only one, in the middle of epoch 1: their processes start anew for every epoch. In
    order only the middle ones: it is a shuffled order that is lost.
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
) -> Wrong | None:
    expected = [epochs[point.epoch][point.num_batches :], *epochs[point.epoch + 1 :]]
    if list(resumed) == expected:
        return None
    later = next(n for n, epoch in enumerate(expected) if resumed[n] != epoch)
    number = point.epoch + later
    return Wrong(
        _describe(epochs, point, resumed[later], later),
        (
            f"{describe_case(plan, point)}, rank {plan.rank}",
            f"left of epoch {number}: {show_epoch(expected[later])}",
            f"resumed:         {show_epoch(resumed[later])}",
        ),
    )


def _describe(epochs: Sequence[Epoch], point: ResumePoint, actual: Epoch, later: int) -> str:
    """What the resumed run did instead, where it is one of the known mistakes."""
    number = point.epoch + later
    where = f"a run resumed in epoch {point.epoch}"
    skipped = point.num_batches
    if later and skipped and actual == epochs[number][skipped:]:
        return f"{where} skips {skipped} batches of epoch {number}, too"
    for other, epoch in enumerate(epochs):
        if other != number and actual == (epoch if later else epoch[skipped:]):
            return f"{where} has the order of epoch {other} in epoch {number}"
    if not later and actual == epochs[number]:
        return f"{where} begins the epoch again"
    return f"{where} sees other samples in epoch {number}{_lost_and_repeated(epochs, point, actual, later)}"


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
        f"{listed(lost)} never" if lost else "",
        f"{listed(repeated)} again" if repeated else "",
    ]
    return ": " + ", ".join(filter(None, parts))
