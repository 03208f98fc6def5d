"""Records the batches of a data loop, and checks resumes in the middle of the first and of later epochs."""

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from assay.devices.torch_settings import seed_generators
from assay.training.state.generators import generator_states, restore_generators
from assay_smoke.data.properties import PropertyLog, Subject, Violation, list_numbers
from assay_smoke.data.protocols import LoaderPlan, OpenRun, ResumePoint, Stateful

Batch = list[int]
Epoch = list[Batch]

_EPOCHS_WANTED = "an iterable of epochs, each an iterable of batches of sample numbers"


def record_run(
    subject: Subject,
    open_run: OpenRun,
    plan: LoaderPlan,
    resumed: ResumePoint | None = None,
    restored: Mapping[str, Any] | None = None,
) -> list[Epoch]:
    """Return the batches of one rank from the resumed epoch to the last, as in a new process.

    restored: generator states, set after the loop is open, as a training script loads a checkpoint
        after it has built its data loader.
    """
    seed_generators(plan.seed)
    num_epochs = plan.num_epochs - (resumed.epoch if resumed else 0)
    with subject.called_for(describe_case(plan, resumed)):
        run = open_run(plan, resumed)
        if restored is not None:
            restore_generators(restored, "cpu")
        epochs = [
            list(_batches_of(subject, epoch, plan)) for epoch in islice(iter(run), num_epochs)
        ]
    if len(epochs) != num_epochs:
        raise subject.returned(f"{len(epochs)} epochs of {num_epochs}", _EPOCHS_WANTED)
    return epochs


def interrupt_run(
    subject: Subject, open_run: OpenRun, plan: LoaderPlan, epoch: int, num_batches: int
) -> tuple[ResumePoint, dict[str, Any]]:
    """Draw `num_batches` batches of `epoch`. Return the point and the generator states."""
    seed_generators(plan.seed)
    with subject.called_for(describe_case(plan, None)):
        run = open_run(plan, None)
        epochs = iter(run)
        for _ in range(epoch):
            for _batch in _batches_of(subject, next(epochs), plan):
                pass
        batches = _batches_of(subject, next(epochs), plan)
        for _ in range(num_batches):
            next(batches)
        state = copy.deepcopy(run.state_dict()) if isinstance(run, Stateful) else None
    return ResumePoint(epoch, num_batches, state), generator_states("cpu")


def _batches_of(
    subject: Subject, epoch: Iterable[Sequence[int]], plan: LoaderPlan
) -> Iterator[Batch]:
    """Yield batches as lists of numbers. Raises: RaisedError for an endless epoch."""
    most = 4 * plan.num_samples + 16
    for number, batch in enumerate(epoch):
        if number == most:
            raise subject.returned(
                f"an epoch of more than {most} batches for {plan.num_samples} samples",
                "epochs that end",
            )
        yield [int(sample) for sample in batch]


def describe_case(plan: LoaderPlan, resumed: ResumePoint | None = None) -> str:
    """Describe the plan briefly."""
    batches = f"batches of {plan.batch_size}"
    if plan.tokens_per_batch:
        batches = f"batches of at most {plan.tokens_per_batch} tokens"
    parts = [
        f"{plan.num_samples} samples",
        batches,
        f"{plan.num_ranks} rank{'s' if plan.num_ranks > 1 else ''}",
        f"{plan.num_workers} workers" if plan.num_workers else "",
        "shuffled" if plan.shuffle else "in order",
        "drop_last" if plan.drop_last else "",
        f"seed {plan.seed}",
        f"resumed after {resumed.num_batches} batches of epoch {resumed.epoch}" if resumed else "",
    ]
    return ", ".join(filter(None, parts))


def show_epoch(epoch: Epoch, most: int = 8) -> str:
    """Show the batches of an epoch in a line."""
    shown = " ".join(str(batch) for batch in epoch[:most])
    rest = len(epoch) - most
    return f"{shown} and {rest} more" if rest > 0 else shown or "no batch"


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
