"""Checks random numbers in data loader workers: no two workers or epochs may draw the same.

Workers are processes. Forked with equal generator states, they augment their samples alike. Seeded
by worker number alone, they repeat each epoch.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from assay.devices.torch_settings import seed_generators
from assay_smoke.data.properties import PropertyLog, Subject, SubjectReport, Violation, list_numbers
from assay_smoke.data.protocols import Feature, MakeDataset, OpenLoader

LIBRARIES = ("numpy", "random", "torch")
NEW_IN_WORKERS = {name: f"workers draw different numbers from {name}" for name in LIBRARIES}
NEW_IN_EPOCHS = {name: f"epochs draw different numbers from {name}" for name in LIBRARIES}
REPEATABLE = "the same seed draws the same numbers"
LOADER_PROPERTIES = (*NEW_IN_WORKERS.values(), *NEW_IN_EPOCHS.values(), REPEATABLE)

ITEMS_DIFFER = "items of different workers differ by their random numbers"
ITEMS_NEW_IN_EPOCHS = "items of different epochs differ by their random numbers"
DATASET_PROPERTIES = (ITEMS_DIFFER, ITEMS_NEW_IN_EPOCHS)

_NUM_WORKERS = 2
_NUM_EPOCHS = 2
_NUM_ITEMS = 8
_SEED = 0
# Chance of two equal draws: 2^-31.
_RANGE = 2**31


@dataclass(frozen=True, slots=True)
class _Draw:
    """The random numbers of one item. Worker -1 is the main process."""

    epoch: int
    worker: int
    item: int
    numbers: dict[str, int]


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
    draws = _record_draws(subject, open_loader, 0)
    for library in LIBRARIES:
        log.judge(NEW_IN_WORKERS[library], _find_equal(draws, library, "workers"))
        log.judge(NEW_IN_EPOCHS[library], _find_equal(draws, library, "epochs"))
    again = _record_draws(subject, open_loader, 0)
    log.judge(REPEATABLE, _find_unrepeated(draws, again))
    other_rank = _record_draws(subject, open_loader, 1)
    if [draw.numbers for draw in draws] == [draw.numbers for draw in other_rank]:
        log.note("ranks with equal seeds draw the same numbers in their workers")
    return log.report()


def _record_draws(subject: Subject, open_loader: OpenLoader, rank: int) -> list[_Draw]:
    seed_generators(_SEED)
    draws = []
    with subject.called_for(f"{_NUM_ITEMS} items, {_NUM_WORKERS} workers, rank {rank}"):
        loader = open_loader(ComputedItems(_NUM_ITEMS, _draw), _NUM_WORKERS, rank)
        for epoch in range(_NUM_EPOCHS):
            for batch in loader:
                draws += [_read_item(subject, epoch, item) for item in batch]
    workers = {draw.worker for draw in draws}
    if len(workers) < _NUM_WORKERS:
        raise subject.returned(
            f"a loader whose items came from {len(workers)} process"
            f"{'' if len(workers) == 1 else 'es'}",
            f"one with {_NUM_WORKERS} workers, for {_NUM_ITEMS} items in batches of at most"
            f" {_NUM_ITEMS // _NUM_WORKERS}",
        )
    return draws


def _read_item(subject: Subject, epoch: int, item: object) -> _Draw:
    wanted = f"unchanged items, lists of {2 + len(LIBRARIES)} numbers: use collate_fn=list"
    if not isinstance(item, list) or len(item) != 2 + len(LIBRARIES):
        raise subject.returned(f"a batch with {item!r:.60}", wanted)
    worker, number, *numbers = map(int, item)
    return _Draw(epoch, worker, number, dict(zip(LIBRARIES, numbers, strict=True)))


def _find_equal(draws: Sequence[_Draw], library: str, between: str) -> Violation | None:
    """Find two equal draws from two workers of an epoch, or from two epochs."""
    for number, one in enumerate(draws):
        for other in draws[:number]:
            if one.numbers[library] != other.numbers[library]:
                continue
            same_epoch = one.epoch == other.epoch
            if same_epoch and one.worker != other.worker and between == "workers":
                reason = f"workers {other.worker} and {one.worker} draw the same from {library}"
                return Violation(reason, _show(other, one, library))
            if not same_epoch and between == "epochs":
                reason = f"epoch {one.epoch} draws from {library} what epoch {other.epoch} drew"
                return Violation(reason, _show(other, one, library))
    return None


def _show(one: _Draw, other: _Draw, library: str) -> tuple[str, ...]:
    return tuple(
        f"epoch {draw.epoch}, worker {draw.worker}, item {draw.item}: {draw.numbers[library]}"
        for draw in (one, other)
    )


def _find_unrepeated(draws: Sequence[_Draw], again: Sequence[_Draw]) -> Violation | None:
    key = {(draw.epoch, draw.item): draw for draw in again}
    for draw in draws:
        other = key.get((draw.epoch, draw.item))
        if other is None:
            return Violation(f"the second run has no item {draw.item} in epoch {draw.epoch}")
        for library in LIBRARIES:
            if draw.numbers[library] != other.numbers[library]:
                reason = f"two runs with equal seeds draw different numbers from {library}"
                return Violation(reason, _show(draw, other, library))
    return None


def check_dataset(
    subject: Subject, make_dataset: MakeDataset, open_loader: OpenLoader
) -> SubjectReport:
    """Load a dataset of equal samples, whose items differ only by random numbers."""
    log = PropertyLog(subject.name, DATASET_PROPERTIES)
    seed_generators(_SEED)
    epochs: list[dict[int, tuple[int, str]]] = []
    with subject.called_for(f"{_NUM_ITEMS} equal samples, {_NUM_WORKERS} workers"):
        dataset = make_dataset(_equal_samples())
        if len(dataset) != _NUM_ITEMS:
            raise subject.returned(f"{len(dataset)} items", f"{_NUM_ITEMS} items, one per sample")
        loader = open_loader(ComputedItems(len(dataset), partial(_label, dataset)), _NUM_WORKERS, 0)
        epochs += [_read_epoch(loader) for _ in range(_NUM_EPOCHS)]
    items = [shown for epoch in epochs for _, shown in epoch.values()]
    if len(set(items)) == 1:
        raise subject.returned(
            "equal items for equal samples: it draws no random numbers",
            "a dataset whose items are random",
        )
    log.judge(ITEMS_DIFFER, _find_equal_items(epochs[0]))
    log.judge(ITEMS_NEW_IN_EPOCHS, _find_equal_epochs(epochs))
    return log.report()


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


def _read_epoch(loader: Iterable[Iterable[Any]]) -> dict[int, tuple[int, str]]:
    """Return the worker and text of each item."""
    return {number: (worker, shown) for batch in loader for worker, number, shown in batch}


def _find_equal_items(epoch: dict[int, tuple[int, str]]) -> Violation | None:
    by_text: dict[str, tuple[int, int]] = {}
    for number, (worker, shown) in sorted(epoch.items()):
        other = by_text.setdefault(shown, (worker, number))
        if other[0] != worker:
            return Violation(
                f"items {other[1]} and {number}, of workers {other[0]} and {worker}, are equal",
                (f"both: {shown[:160]}",),
            )
    return None


def _find_equal_epochs(epochs: Sequence[dict[int, tuple[int, str]]]) -> Violation | None:
    first, second = epochs
    equal = [
        number for number in first if number in second and first[number][1] == second[number][1]
    ]
    if not equal:
        return None
    return Violation(
        f"items {list_numbers(equal)} are the same in epochs 0 and 1",
        (f"item {equal[0]} in both: {first[equal[0]][1][:160]}",),
    )
