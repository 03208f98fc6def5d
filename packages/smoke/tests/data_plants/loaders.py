"""DataLoaders and random datasets of users: correct ones, and known mistakes."""

import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info


def _loader(dataset: Any, num_workers: int, init: Any = None) -> Iterable[Iterable[object]]:
    loader: Iterable[Iterable[object]] = DataLoader(
        dataset, 2, num_workers=num_workers, collate_fn=list, worker_init_fn=init
    )
    return loader


def right(dataset: Any, num_workers: int, _: int) -> Iterable[Iterable[object]]:
    return _loader(dataset, num_workers)


def _as_tensors(items: Sequence[Sequence[int]]) -> list[object]:
    return [list(torch.tensor(item)) for item in items]


def right_as_tensors(dataset: Any, num_workers: int, _: int) -> Iterable[Iterable[object]]:
    loader: Iterable[Iterable[object]] = DataLoader(
        dataset, 2, num_workers=num_workers, collate_fn=_as_tensors
    )
    return loader


def _same_numpy(_: int) -> None:
    np.random.seed(0)  # noqa: NPY002


def numpy_forked(dataset: Any, num_workers: int, _: int) -> Iterable[Iterable[object]]:
    """Give all workers numpy's state of their parent, as torch 1.8 did."""
    return _loader(dataset, num_workers, _same_numpy)


def _by_number(worker: int) -> None:
    np.random.seed(worker)  # noqa: NPY002
    random.seed(worker)


def seeded_by_number(dataset: Any, num_workers: int, _: int) -> Iterable[Iterable[object]]:
    """Seed each worker by its number in every epoch."""
    return _loader(dataset, num_workers, _by_number)


def _by_chance(_: int) -> None:
    random.seed(None)


def never_repeated(dataset: Any, num_workers: int, _: int) -> Iterable[Iterable[object]]:
    return _loader(dataset, num_workers, _by_chance)


def _same_torch(_: int) -> None:
    torch.manual_seed(0)


def torch_forked(dataset: Any, num_workers: int, _: int) -> Iterable[Iterable[object]]:
    return _loader(dataset, num_workers, _same_torch)


def fixed_generator(dataset: Any, num_workers: int, _: int) -> Iterable[Iterable[object]]:
    """Seed the workers from a generator with a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    loader: Iterable[Iterable[object]] = DataLoader(
        dataset, 2, num_workers=num_workers, collate_fn=list, generator=generator
    )
    return loader


def one_process(dataset: Any, num_workers: int, _: int) -> Iterable[Iterable[object]]:
    del num_workers
    return _loader(dataset, 0)


class _Random(Sequence[Any]):
    """Samples with one random number each, from a generator that is looked up per item."""

    def __init__(self, samples: Sequence[Any], generator: Any) -> None:
        self._samples = samples
        self._generator = generator

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, item: Any) -> Any:
        generator = self._generator(get_worker_info())
        return [*self._samples[item]["input_ids"][:3], int(generator.integers(2**31))]


def right_items(samples: Sequence[Any]) -> Sequence[Any]:
    """Use a generator per worker, seeded by torch's seed, which changes with each epoch."""
    made: dict[int, np.random.Generator] = {}

    def generator(info: Any) -> np.random.Generator:
        return made.setdefault(info.id, np.random.default_rng(torch.initial_seed()))

    return _Random(samples, generator)


def held_generator(samples: Sequence[Any]) -> Sequence[Any]:
    """Copy the dataset's one generator into every worker."""
    own = np.random.default_rng(0)
    return _Random(samples, lambda _: own)


def generator_by_worker(samples: Sequence[Any]) -> Sequence[Any]:
    """Use a generator per worker that repeats in every epoch."""
    made: dict[int, np.random.Generator] = {}
    return _Random(samples, lambda info: made.setdefault(info.id, np.random.default_rng(info.id)))


def unseeded_generator(samples: Sequence[Any]) -> Sequence[Any]:
    """Draw from the operating system, which no seed reaches."""
    return _Random(samples, lambda _: np.random.default_rng())


def fixed_items(samples: Sequence[Any]) -> Sequence[Any]:
    return [sample["input_ids"] for sample in samples]
