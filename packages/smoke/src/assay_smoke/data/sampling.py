"""Checks samplers and batch samplers over ranks: steps, batch sizes, order, and resumes."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

from assay_smoke.data.properties import (
    DeclinedError,
    PropertyLog,
    Subject,
    SubjectReport,
    Violation,
    first_violation,
    list_numbers,
)
from assay_smoke.data.protocols import LoaderPlan, OpenRun
from assay_smoke.data.resuming import Epoch, describe_case, judge_resumes, record_run, show_epoch

EQUAL_STEPS = "every rank makes the same number of steps"
BATCH_SIZE = "no batch is larger than asked for"
ONCE = "every sample is seen once in an epoch"
NEW_ORDER = "shuffled epochs differ in order"
REPEATABLE = "the same seed gives the same order"
RESUMED = "a resumed run sees exactly what was left"

PROPERTIES = (EQUAL_STEPS, BATCH_SIZE, ONCE, NEW_ORDER, REPEATABLE, RESUMED)

# Fewer samples often have equal permutations by chance; 12 have once in 479,001,600.
FEWEST_TO_SHUFFLE = 12

# Samples, batch size, ranks, workers; smallest first. Some divide evenly, others do not.
_SHAPES = (
    (12, 1, 1, 0),
    (13, 1, 2, 0),
    (12, 3, 2, 0),
    (29, 4, 3, 0),
    (13, 2, 2, 2),
)
SAMPLER_PLANS = tuple(
    LoaderPlan(n, size, 0, ranks, workers, shuffle=shuffle, drop_last=drop_last)
    for n, size, ranks, workers in _SHAPES
    for shuffle in (True, False)
    for drop_last in (False, True)
    # Workers are processes, which are slow to start: one plan is enough.
    if not workers or (shuffle and not drop_last)
)

# Long and short samples in turn, so that batches differ in their number of samples.
_LENGTHS = (3, 60, 5, 8, 33, 1, 2, 50, 13, 21, 4, 40, 7, 9, 30, 6, 11)
BATCH_SAMPLER_PLANS = tuple(
    LoaderPlan(
        len(lengths), len(lengths), 0, ranks, shuffle=shuffle, drop_last=drop_last,
        lengths=lengths, tokens_per_batch=64,
    )
    for lengths, ranks in ((_LENGTHS[:12], 2), (_LENGTHS, 2), (_LENGTHS * 2, 3))
    for shuffle in (True, False)
    for drop_last in (False, True)
)  # fmt: skip


def check_sampling(
    subject: Subject, open_run: OpenRun, plans: Sequence[LoaderPlan] = SAMPLER_PLANS
) -> SubjectReport:
    """Run `open_run` for every plan, rank and epoch, and again from interruptions.

    A plan that raises NotImplementedError is skipped and noted.
    """
    log = PropertyLog(subject.name, PROPERTIES)
    num_declined = 0
    for plan in plans:
        try:
            by_rank = [
                record_run(subject, open_run, replace(plan, rank=rank))
                for rank in range(plan.num_ranks)
            ]
        except DeclinedError as error:
            log.note(str(error))
            num_declined += 1
            continue
        for epoch in range(plan.num_epochs):
            _judge_epoch(log, plan, epoch, [epochs[epoch] for epochs in by_rank])
        if plan.shuffle and plan.num_samples >= FEWEST_TO_SHUFFLE:
            log.judge(NEW_ORDER, _find_repeated_order(plan, by_rank))
        log.judge(REPEATABLE, _find_other_order(plan, by_rank, subject, open_run))
        judge_resumes(log, RESUMED, subject, open_run, plan, by_rank)
    if num_declined:
        log.waive_untried("all plans for it are declined")
    return log.report()


def _judge_epoch(log: PropertyLog, plan: LoaderPlan, epoch: int, by_rank: Sequence[Epoch]) -> None:
    shown = (
        describe_case(plan),
        *(f"epoch {epoch}, rank {rank}: {show_epoch(one)}" for rank, one in enumerate(by_rank)),
    )
    steps = [len(one) for one in by_rank]
    unequal = Violation(
        f"the ranks make {list_numbers(steps)} steps: the first collective after the shortest hangs",
        shown,
    )
    log.judge(EQUAL_STEPS, unequal if len(set(steps)) > 1 else None)
    batches = [batch for one in by_rank for batch in one]
    log.judge(BATCH_SIZE, first_violation(_find_too_large(plan, batch, shown) for batch in batches))
    log.judge(ONCE, _find_lost_or_repeated(log, plan, by_rank, shown))


def _find_too_large(
    plan: LoaderPlan, batch: Sequence[int], shown: Sequence[str]
) -> Violation | None:
    if len(batch) > plan.batch_size:
        return Violation(
            f"a batch has {len(batch)} samples instead of {plan.batch_size}", tuple(shown)
        )
    if not plan.tokens_per_batch or len(batch) == 1:  # a single sample may exceed the budget
        return None
    num_tokens = sum(plan.lengths[sample] for sample in batch if sample < plan.num_samples)
    if num_tokens <= plan.tokens_per_batch:
        return None
    return Violation(f"batch {list(batch)} has {num_tokens} tokens", tuple(shown))


def _find_lost_or_repeated(
    log: PropertyLog, plan: LoaderPlan, by_rank: Sequence[Epoch], shown: Sequence[str]
) -> Violation | None:
    seen = Counter(sample for one in by_rank for batch in one for sample in batch)
    unknown = sorted(seen.keys() - set(range(plan.num_samples)))
    if unknown:
        return Violation(f"there are no samples {list_numbers(unknown)}", tuple(shown))
    lost = [sample for sample in range(plan.num_samples) if not seen[sample]]
    repeated = [sample for sample, count in sorted(seen.items()) if count > 1]
    num_repeats = sum(seen.values()) - len(seen)
    excused_lost, excused_repeats = _excused(plan, by_rank)
    faults = []
    if len(lost) > excused_lost:
        allowed = f"; drop_last may leave out {excused_lost} here" if plan.drop_last else ""
        faults.append(f"samples {list_numbers(lost)} are never seen{allowed}")
    if num_repeats > excused_repeats:
        ranks = [
            rank
            for rank, one in enumerate(by_rank)
            for batch in one
            for sample in batch
            if sample == repeated[0]
        ]
        faults.append(
            f"samples {list_numbers(repeated)} are seen more than once"
            f" (sample {repeated[0]} by rank {list_numbers(ranks)})"
        )
    if faults:
        return Violation("; ".join(faults), tuple(shown))
    if num_repeats:
        log.note("samples are repeated to fill the last batch of every rank")
    return None


def _excused(plan: LoaderPlan, by_rank: Sequence[Epoch]) -> tuple[int, int]:
    """Return how many samples may be lost and how many repeats are allowed to even out the ranks."""
    if plan.tokens_per_batch:
        # At most one batch on each rank but one evens the ranks out.
        largest = max((len(batch) for one in by_rank for batch in one), default=1)
        uneven = (plan.num_ranks - 1) * max(largest, 1)
        return (uneven, 0) if plan.drop_last else (0, uneven)
    if plan.drop_last:
        # With an iterable dataset, each worker drops its own last batch.
        whole = prod((plan.num_ranks, plan.batch_size, max(1, plan.num_workers)))
        return (0 if plan.num_samples % whole == 0 else whole - 1), 0
    whole = plan.num_ranks * plan.batch_size
    return 0, (0 if plan.num_samples % whole == 0 else whole - 1)


def _find_repeated_order(plan: LoaderPlan, by_rank: Sequence[Sequence[Epoch]]) -> Violation | None:
    orders = [_flat(epochs[epoch] for epochs in by_rank) for epoch in range(plan.num_epochs)]
    for later in range(1, plan.num_epochs):
        for earlier in range(later):
            if orders[later] == orders[earlier] and orders[later]:
                return Violation(
                    f"epoch {later} has the order of epoch {earlier}: set_epoch is not called or does"
                    " not reach the sampler",
                    (
                        describe_case(plan),
                        f"epoch {earlier}, rank 0: {show_epoch(by_rank[0][earlier])}",
                        f"epoch {later}, rank 0: {show_epoch(by_rank[0][later])}",
                    ),
                )
    return None


def _flat(epochs: Iterable[Epoch]) -> list[list[int]]:
    return [[sample for batch in epoch for sample in batch] for epoch in epochs]


def _find_other_order(
    plan: LoaderPlan, by_rank: Sequence[Sequence[Epoch]], subject: Subject, open_run: OpenRun
) -> Violation | None:
    again = record_run(subject, open_run, plan)
    if again == by_rank[0]:
        return None
    epoch = next(e for e in range(plan.num_epochs) if again[e] != by_rank[0][e])
    return Violation(
        f"two runs with seed {plan.seed} differ from epoch {epoch} on",
        (
            describe_case(plan),
            f"epoch {epoch}, rank 0, first run: {show_epoch(by_rank[0][epoch])}",
            f"epoch {epoch}, rank 0, second run: {show_epoch(again[epoch])}",
        ),
    )
