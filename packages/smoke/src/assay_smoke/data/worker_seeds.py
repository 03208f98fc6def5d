"""Checks random numbers in data loader workers: no two workers or epochs may draw the same.

Workers are processes. Forked with equal generator states, they augment their samples alike. Seeded
by worker number alone, they repeat each epoch.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from typing import Any

from assay.devices.torch_backend import seed_generators
from assay_smoke.data.properties import Fault, PropertyLog, Subject, SubjectReport
from assay_smoke.data.protocols import Feature, MakeDataset, OpenLoader

LIBRARIES = ("numpy", "random", "torch")
# The name of the value of a dataset's item, in place of a library.
ITEM = "item"
NEW_IN_WORKERS = {name: f"workers draw different numbers from {name}" for name in LIBRARIES}
NEW_IN_EPOCHS = {name: f"epochs draw different numbers from {name}" for name in LIBRARIES}
REPEATABLE = "the same seed draws the same numbers"
LOADER_PROPERTIES = (*NEW_IN_WORKERS.values(), *NEW_IN_EPOCHS.values(), REPEATABLE)

NEW_IN_WORKERS[ITEM] = "items of different workers differ by their random numbers"
NEW_IN_EPOCHS[ITEM] = "items of different epochs differ by their random numbers"
DATASET_PROPERTIES = (NEW_IN_WORKERS[ITEM], NEW_IN_EPOCHS[ITEM])

_NUM_WORKERS = 2
_NUM_EPOCHS = 2
_NUM_ITEMS = 8
_SEED = 0
# Chance of two equal draws: 2^-31.
_RANGE = 2**31


@dataclass(frozen=True, slots=True)
class _Draw:
    """The random values of one item. Worker -1 is the main process."""

    epoch: int
    worker: int
    item: int
    values: dict[str, object]

    def show(self, name: str) -> str:
        """Show one value in a line."""
        return f"epoch {self.epoch}, worker {self.worker}, item {self.item}: {self.values[name]!s:.160}"


class ComputedItems(Sequence[Any]):
    """A dataset that computes an item when it is read."""

    def __init__(self, num_items: int, compute: Callable[[int], object]) -> None:
        self._num_items, self._compute = num_items, compute

    def __len__(self) -> int:
        return self._num_items

    def __getitem__(self, item: Any) -> Any:  # noqa: ANN401 - a Sequence also takes slices
        if not 0 <= item < self._num_items:
            raise IndexError(item)
        return self._compute(item)


def _draw(item: int) -> list[int]:
    """Return the worker's number, the item's, and one draw per library."""
    import numpy as np
    import torch

    return [
        _worker_number(),
        item,
        int(np.random.randint(_RANGE)),  # noqa: NPY002 - the check is about the global state
        random.randrange(_RANGE),  # noqa: S311
        int(torch.randint(_RANGE, ()).item()),
    ]


def _label(dataset: Sequence[object], item: int) -> list[object]:
    """Return an item of `dataset` as text, after the worker's number and its own."""
    return [_worker_number(), item, _as_text(dataset[item])]


def _worker_number() -> int:
    """Return the number of this worker, -1 in the main process."""
    from torch.utils.data import get_worker_info

    info = get_worker_info()
    return -1 if info is None else int(info.id)


def check_loader(subject: Subject, open_loader: OpenLoader) -> SubjectReport:
    """Iterate the loader over two epochs with two workers, twice from the same seeds."""
    log = PropertyLog(subject.name, LOADER_PROPERTIES)

    def record(rank: int) -> list[_Draw]:
        seed_generators(_SEED)
        with subject.called_for(f"{_NUM_ITEMS} items, {_NUM_WORKERS} workers, rank {rank}"):
            return _record(subject, open_loader, ComputedItems(_NUM_ITEMS, _draw), LIBRARIES, rank)

    draws, again, other_rank = record(0), record(0), record(1)
    log.judge(LOADER_PROPERTIES, [*_find_equal(draws), *_find_unrepeated(draws, again)])
    if [draw.values for draw in draws] == [draw.values for draw in other_rank]:
        log.note("ranks with equal seeds draw the same numbers in their workers")
    return log.report()


def check_dataset(
    subject: Subject, make_dataset: MakeDataset, open_loader: OpenLoader
) -> SubjectReport:
    """Load a dataset of equal samples, whose items differ only by random numbers."""
    log = PropertyLog(subject.name, DATASET_PROPERTIES)
    seed_generators(_SEED)
    with subject.called_for(f"{_NUM_ITEMS} equal samples, {_NUM_WORKERS} workers"):
        dataset = make_dataset(_equal_samples())
        if len(dataset) != _NUM_ITEMS:
            raise subject.returned(f"{len(dataset)} items", f"{_NUM_ITEMS} items, one per sample")
        items = ComputedItems(len(dataset), partial(_label, dataset))
        draws = _record(subject, open_loader, items, [ITEM])
    if len({draw.values[ITEM] for draw in draws}) == 1:
        raise subject.returned(
            "equal items for equal samples: it draws no random numbers",
            "a dataset whose items are random",
        )
    log.judge(DATASET_PROPERTIES, _find_equal(draws))
    return log.report()


def _record(
    subject: Subject,
    open_loader: OpenLoader,
    dataset: ComputedItems,
    names: Sequence[str],
    rank: int = 0,
) -> list[_Draw]:
    """Iterate a loader over all epochs. Items are lists of worker, number, and a value for each name."""
    loader = open_loader(dataset, _NUM_WORKERS, rank)
    draws = []
    for epoch in range(_NUM_EPOCHS):
        for item in chain.from_iterable(loader):
            if not isinstance(item, list) or len(item) != 2 + len(names):
                wanted = f"unchanged items, lists of {2 + len(names)} numbers: use collate_fn=list"
                raise subject.returned(f"a batch with {item!r:.60}", wanted)
            worker, number, *values = item
            # Numbers may come as tensors.
            values = [value if isinstance(value, str) else int(value) for value in values]
            named = dict(zip(names, values, strict=True))
            draws.append(_Draw(epoch, int(worker), int(number), named))
    num_workers = len({draw.worker for draw in draws})
    if num_workers < _NUM_WORKERS:
        raise subject.returned(
            f"a loader whose items came from {num_workers} process{'' if num_workers == 1 else 'es'}",
            f"one with {_NUM_WORKERS} workers, for {_NUM_ITEMS} items in batches of at most"
            f" {_NUM_ITEMS // _NUM_WORKERS}",
        )
    return draws


def _find_equal(draws: Sequence[_Draw]) -> Iterator[Fault]:
    """Find equal values of two workers in an epoch, or of two epochs. Only equal items repeat an epoch."""
    pairs = ((a, b) for at, b in enumerate(draws) for a in draws[:at])
    for (a, b), name in product(pairs, draws[0].values):
        is_other_item = name == ITEM and a.epoch != b.epoch and a.item != b.item
        if a.values[name] != b.values[name] or is_other_item:
            continue
        shown, is_item = (a.show(name), b.show(name)), name == ITEM
        if a.epoch != b.epoch:
            reason = f"epoch {b.epoch} draws from {name} what epoch {a.epoch} drew"
            same = f"item {b.item} is the same in epochs {a.epoch} and {b.epoch}"
            yield Fault(NEW_IN_EPOCHS[name], same if is_item else reason, shown)
        elif a.worker != b.worker:
            reason = f"workers {a.worker} and {b.worker} draw the same from {name}"
            same = f"items {a.item} and {b.item}, of workers {a.worker} and {b.worker}, are equal"
            yield Fault(NEW_IN_WORKERS[name], same if is_item else reason, shown)


def _find_unrepeated(draws: Sequence[_Draw], again: Sequence[_Draw]) -> Iterator[Fault]:
    repeated = {(draw.epoch, draw.item): draw for draw in again}
    for draw in draws:
        other = repeated.get((draw.epoch, draw.item))
        if other is None:
            yield Fault(REPEATABLE, f"the second run has no item {draw.item} in epoch {draw.epoch}")
            continue
        for name in LIBRARIES:
            if draw.values[name] != other.values[name]:
                reason = f"two runs with equal seeds draw different numbers from {name}"
                yield Fault(REPEATABLE, reason, (draw.show(name), other.show(name)))


def _equal_samples() -> list[Feature]:
    # Long enough that equal maskings by chance are unlikely.
    ids = list(range(ord("a"), ord("z") + 1)) * 3
    return [Feature(input_ids=list(ids), attention_mask=[1] * len(ids)) for _ in range(_NUM_ITEMS)]


def _as_text(item: object) -> str:
    """Return all values of an item as text. Tensors abbreviate themselves."""
    from torch import Tensor

    if isinstance(item, Tensor):
        return repr(item.tolist())
    if hasattr(item, "keys") and hasattr(item, "items"):
        return repr({key: _as_text(value) for key, value in item.items()})
    if isinstance(item, list | tuple):
        return repr([_as_text(value) for value in item])
    return repr(item)
