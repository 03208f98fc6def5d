"""Data loops of one rank by users: correct ones, and known mistakes."""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

Epochs = Iterable[Iterable[Sequence[int]]]
_RUNS = itertools.count()


def _order(plan: Any, seed: int) -> list[int]:
    samples = list(range(plan.num_samples))
    if plan.shuffle:
        random.Random(seed).shuffle(samples)  # noqa: S311 - a reproducible order, no secret
    return samples


def _seed(plan: Any, epoch: int) -> int:
    return int(plan.seed + epoch)


def _batches(plan: Any, order: Sequence[int]) -> list[list[int]]:
    """Return this rank's batch of each round over all ranks."""
    whole = plan.num_ranks * plan.batch_size
    if plan.drop_last:
        order = order[: len(order) // whole * whole]
    else:
        order = [*order, *itertools.islice(itertools.cycle(order), -len(order) % whole)]
    size = plan.batch_size
    return [
        list(order[begin : begin + size]) for begin in range(plan.rank * size, len(order), whole)
    ]


def _run(
    plan: Any,
    resumed: Any,
    *,
    seed: Callable[[Any, int], int] = _seed,
    batches: Callable[[Any, Sequence[int]], list[list[int]]] = _batches,
) -> Iterator[list[list[int]]]:
    first, seen = (resumed.epoch, resumed.num_batches) if resumed else (0, 0)
    for epoch in range(first, plan.num_epochs):
        own = batches(plan, _order(plan, seed(plan, epoch)))
        yield own[seen:] if epoch == first else own


def right(plan: Any, resumed: Any) -> Epochs:
    return _run(plan, resumed)


class Stateful:
    """Correct, and resumed by its own state alone, like stateful data loaders."""

    def __init__(self, plan: Any, resumed: Any) -> None:
        self._plan = plan
        self.position: tuple[int, int] = resumed.state if resumed else (0, 0)

    def state_dict(self) -> tuple[int, int]:
        return self.position

    def __iter__(self) -> Iterator[Iterator[list[int]]]:
        for epoch in range(self.position[0], self._plan.num_epochs):
            seen = self.position[1]
            yield self._epoch(epoch, seen)
            self.position = (epoch + 1, 0)

    def _epoch(self, epoch: int, seen: int) -> Iterator[list[int]]:
        own = _batches(self._plan, _order(self._plan, _seed(self._plan, epoch)))
        for number, batch in enumerate(own[seen:], seen + 1):
            self.position = (epoch, number)
            yield batch


def in_order_only(plan: Any, resumed: Any) -> Epochs:
    if plan.shuffle:
        raise NotImplementedError("never shuffled")
    return _run(plan, resumed)


def set_epoch_forgotten(plan: Any, resumed: Any) -> Epochs:
    return _run(plan, resumed, seed=lambda plan, _: plan.seed)


def seed_times_epoch(plan: Any, resumed: Any) -> Epochs:
    return _run(plan, resumed, seed=lambda plan, epoch: plan.seed * epoch)


def one_epoch_too_many(plan: Any, resumed: Any) -> Epochs:
    return _run(replace(plan, num_epochs=plan.num_epochs + 1), resumed)


def epochs_counted_from_the_resume(plan: Any, resumed: Any) -> Epochs:
    more = resumed.epoch if resumed else 0
    return _run(replace(plan, num_epochs=plan.num_epochs + more), resumed)


def epoch_lost_by_resume(plan: Any, resumed: Any) -> Epochs:
    """Skip with a new loader, whose epoch stays 0 until the next one begins."""
    first = resumed.epoch if resumed and resumed.num_batches else None
    return _run(plan, resumed, seed=lambda plan, epoch: _seed(plan, 0 if epoch == first else epoch))


def epoch_not_restored(plan: Any, resumed: Any) -> Epochs:
    return _run(plan, resumed and SimpleNamespace(epoch=0, num_batches=resumed.num_batches))


def last_epoch_lost_by_resume(plan: Any, resumed: Any) -> Epochs:
    return list(_run(plan, resumed))[: -1 if resumed and resumed.epoch else None]


def offset_kept(plan: Any, resumed: Any) -> Epochs:
    """Skip the batches of the resume in every later epoch too."""
    seen = resumed.num_batches if resumed else 0
    first = resumed.epoch if resumed else 0
    for epoch in range(first, plan.num_epochs):
        yield _batches(plan, _order(plan, _seed(plan, epoch)))[seen:]


def global_generator(plan: Any, resumed: Any) -> Epochs:
    """Draw the order from the global generator when a DataLoader is iterated."""
    loader: Any = DataLoader(
        range(plan.num_samples),  # type: ignore[arg-type] # any sequence
        plan.batch_size * plan.num_ranks,
        shuffle=plan.shuffle,
        drop_last=plan.drop_last,
        collate_fn=list,
    )

    def own(batch: list[int]) -> list[int]:
        more = itertools.islice(itertools.cycle(batch), plan.num_ranks * plan.batch_size)
        return list(more)[plan.rank * plan.batch_size :][: plan.batch_size]

    def epochs() -> Iterator[Iterator[list[int]]]:
        first, seen = (resumed.epoch, resumed.num_batches) if resumed else (0, 0)
        for epoch in range(first, plan.num_epochs):
            yield map(own, islice(iter(loader), seen if epoch == first else 0, None))

    return epochs()


def begun_again(plan: Any, resumed: Any) -> Epochs:
    """Do not skip seen batches of a resumed epoch."""
    first = resumed.epoch if resumed else 0
    for epoch in range(first, plan.num_epochs):
        yield _batches(plan, _order(plan, _seed(plan, epoch)))


def one_batch_again(plan: Any, resumed: Any) -> Epochs:
    """Do not count the last batch as seen."""
    seen = resumed.num_batches if resumed else 0
    for number, epoch in enumerate(begun_again(plan, resumed)):
        yield [*epoch][max(0, seen - 1) :] if not number else epoch


def one_batch_too_far(plan: Any, resumed: Any) -> Epochs:
    """Count a prefetched batch as seen."""
    for number, epoch in enumerate(_run(plan, resumed)):
        yield epoch[1:] if resumed and resumed.num_batches and not number else epoch


def every_rank_all(plan: Any, resumed: Any) -> Epochs:
    """Give every rank all batches."""

    def all_batches(plan: Any, order: Sequence[int]) -> list[list[int]]:
        size = plan.batch_size
        return [list(order[at : at + size]) for at in range(0, len(order), size)]

    return _run(plan, resumed, batches=all_batches)


def own_seed_on_each_rank(plan: Any, resumed: Any) -> Epochs:
    """Shuffle by another seed on each rank before taking its part."""
    return _run(plan, resumed, seed=lambda plan, epoch: 100 * plan.rank + _seed(plan, epoch))


def dropped_undeclared(plan: Any, resumed: Any) -> Epochs:
    def drop(plan: Any, order: Sequence[int]) -> list[list[int]]:
        whole = plan.num_ranks * plan.batch_size
        return _batches(plan, order[: len(order) // whole * whole])

    return _run(plan, resumed, batches=drop)


def repeated_though_dropping(plan: Any, resumed: Any) -> Epochs:
    def repeat(plan: Any, order: Sequence[int]) -> list[list[int]]:
        whole = plan.num_ranks * plan.batch_size
        filled = [*order, *islice(itertools.cycle(order), -len(order) % whole)]
        return _batches(plan, filled)

    return _run(plan, resumed, batches=repeat)


def uneven_ranks(plan: Any, resumed: Any) -> Epochs:
    """Give the rest to the first ranks."""

    def deal(plan: Any, order: Sequence[int]) -> list[list[int]]:
        size = plan.batch_size
        chunks = [list(order[at : at + size]) for at in range(0, len(order), size)]
        if plan.drop_last and len(chunks[-1]) < size:
            chunks.pop()
        return chunks[plan.rank :: plan.num_ranks]

    return _run(plan, resumed, batches=deal)


def strided_before_it_is_cut(plan: Any, resumed: Any) -> Epochs:
    """Deal single samples to ranks, each of which then drops or fills its own last batch."""

    def deal(plan: Any, order: Sequence[int]) -> list[list[int]]:
        own, size = list(order[plan.rank :: plan.num_ranks]), plan.batch_size
        batches = [own[at : at + size] for at in range(0, len(own), size)]
        return batches[:-1] if plan.drop_last and len(batches[-1]) < size else batches

    return _run(plan, resumed, batches=deal)


def sample_lost_for_another(plan: Any, resumed: Any) -> Epochs:
    """Take one sample twice and another never, within the number that may be repeated."""

    def swap(plan: Any, order: Sequence[int]) -> list[list[int]]:
        return _batches(plan, [order[0], order[0], *order[2:]])

    return _run(plan, resumed, batches=swap)


def workers_of_rank_0(plan: Any, resumed: Any) -> Epochs:
    """Resume every rank by the state of rank 0."""
    if resumed and resumed.num_batches:
        first = _batches(replace(plan, rank=0), _order(plan, _seed(plan, resumed.epoch)))
        rest = list(_run(plan, resumed))
        return iter([first[resumed.num_batches :], *rest[1:]])
    return _run(plan, resumed)


def seeded_by_the_run(plan: Any, resumed: Any) -> Epochs:
    """Seed each run differently, as by the time of day or a salted hash."""
    salt = next(_RUNS)
    return _run(plan, resumed, seed=lambda plan, epoch: 1000 * salt + _seed(plan, epoch))


def batch_of_all_ranks(plan: Any, resumed: Any) -> Epochs:
    """Take the batch size for that of all ranks together."""
    for epoch in _run(plan, resumed):
        yield [
            [number for batch in epoch[at : at + 2] for number in batch]
            for at in range(0, len(epoch), 2)
        ]


class _Everything(IterableDataset[int]):
    def __init__(self, plan: Any) -> None:
        self._plan = plan

    def __iter__(self) -> Iterator[int]:
        return iter(_order(self._plan, self._plan.seed)[self._plan.rank :: self._plan.num_ranks])


def every_worker_all(plan: Any, resumed: Any) -> Epochs:
    """Divide an iterable dataset over ranks, but not over workers."""
    loader: Any = DataLoader(
        _Everything(plan), plan.batch_size, num_workers=plan.num_workers, collate_fn=list
    )
    first, seen = (resumed.epoch, resumed.num_batches) if resumed else (0, 0)
    for epoch in range(first, plan.num_epochs):
        yield islice(iter(loader), seen if epoch == first else 0, None)


def right_budget(plan: Any, resumed: Any) -> Epochs:
    """Make batches by tokens for all ranks at once and deal them in rounds."""
    return _run(plan, resumed, batches=_budgeted)


def _fill(plan: Any, order: Sequence[int], budget: int) -> list[list[int]]:
    batches: list[list[int]] = []
    room = 0
    for sample in order:
        if plan.lengths[sample] > room or not batches:
            batches.append([])
            room = budget
        batches[-1].append(sample)
        room -= plan.lengths[sample]
    return batches


def _budgeted(plan: Any, order: Sequence[int]) -> list[list[int]]:
    batches = _fill(plan, order, plan.tokens_per_batch)
    if plan.drop_last:
        batches = batches[: len(batches) // plan.num_ranks * plan.num_ranks]
    else:
        batches = [*batches, *islice(itertools.cycle(batches), -len(batches) % plan.num_ranks)]
    return batches[plan.rank :: plan.num_ranks]


def large_batches_dropped(plan: Any, resumed: Any) -> Epochs:
    """Deal the batches with the fewest samples first, so that the surplus has the most."""

    def deal(plan: Any, order: Sequence[int]) -> list[list[int]]:
        batches = sorted(_fill(plan, order, plan.tokens_per_batch), key=len)
        if not plan.drop_last:
            return _budgeted(plan, order)
        return batches[: len(batches) // plan.num_ranks * plan.num_ranks][
            plan.rank :: plan.num_ranks
        ]

    return _run(plan, resumed, batches=deal)


def two_rounds_dropped(plan: Any, resumed: Any) -> Epochs:
    """Drop two more rounds than necessary with drop_last."""
    return _run(
        plan,
        resumed,
        batches=lambda plan, order: _budgeted(plan, order)[: -2 if plan.drop_last else None],
    )


def budget_by_rank(plan: Any, resumed: Any) -> Epochs:
    """Fill batches from each rank's own samples, so that their number differs."""
    return _run(
        plan,
        resumed,
        batches=lambda plan, order: _fill(
            plan, order[plan.rank :: plan.num_ranks], plan.tokens_per_batch
        ),
    )


def budget_overrun(plan: Any, resumed: Any) -> Epochs:
    """Add the sample that no longer fits."""

    def overrun(plan: Any, order: Sequence[int]) -> list[list[int]]:
        batches = _fill(plan, order, plan.tokens_per_batch + 40)
        batches = [*batches, *islice(itertools.cycle(batches), -len(batches) % plan.num_ranks)]
        return batches[plan.rank :: plan.num_ranks]

    return _run(plan, resumed, batches=overrun)


def budget_leftover_lost(plan: Any, resumed: Any) -> Epochs:
    """Drop the last batch if it is not full."""
    return _run(plan, resumed, batches=lambda plan, order: _budgeted(plan, order[:-3]))


def endless(plan: Any, resumed: Any) -> Epochs:
    del resumed
    yield ([number % plan.num_samples] for number in itertools.count())


def one_epoch(plan: Any, resumed: Any) -> Epochs:
    yield next(iter(_run(plan, resumed)))


def raises(plan: Any, resumed: Any) -> Epochs:
    del plan, resumed
    return torch.zeros(2)[5]


def seed_ignored(plan: Any, resumed: Any) -> Epochs:
    return _run(plan, resumed, seed=lambda _, epoch: 42 + epoch)


def one_seed_only(plan: Any, resumed: Any) -> Epochs:
    """Correct, and declines to be seeded."""
    if plan.seed:
        raise NotImplementedError("the seed is fixed")
    return _run(plan, resumed)
