"""DataLoaders with the worker seeding of torch and transformers, and datasets with random masking."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from assay_smoke.data.libraries.installed import library_subject
from assay_smoke.data.properties import Subject
from assay_smoke.data.protocols import Feature, MakeDataset, OpenLoader
from assay_smoke.data.tokens.micro_tokenizer import micro_tokenizer
from assay_smoke.data.worker_seeds import ComputedItems


def library_loaders() -> list[tuple[Subject, OpenLoader]]:
    """Return each subject with its loader."""
    return [
        (library_subject("torch", "DataLoader"), torch_loader),
        (library_subject("transformers", "seed_worker, as in its Trainer"), _transformers_loader),
    ]


def library_datasets() -> list[tuple[Subject, MakeDataset]]:
    """Return transformers' random masking with and without its own seed."""
    what = "DataCollatorForLanguageModeling(mlm=True{})"
    return [
        (library_subject("transformers", what.format("")), partial(_masked, seed=None)),
        (library_subject("transformers", what.format(", seed=0")), partial(_masked, seed=0)),
    ]


def torch_loader(
    dataset: Sequence[Sequence[int]], num_workers: int, _rank: int
) -> Iterable[Iterable[object]]:
    """Open a DataLoader whose workers torch seeds."""
    return _open(dataset, num_workers, None)


def _transformers_loader(
    dataset: Sequence[Sequence[int]], num_workers: int, rank: int
) -> Iterable[Iterable[object]]:
    """Open a DataLoader whose workers transformers seeds."""
    from transformers.trainer_utils import seed_worker

    return _open(dataset, num_workers, partial(seed_worker, num_workers=num_workers, rank=rank))


def _open(dataset: Any, num_workers: int, init: Any) -> Iterable[Iterable[object]]:  # noqa: ANN401
    from torch.utils.data import DataLoader

    loader: Iterable[Iterable[object]] = DataLoader(
        dataset, 2, num_workers=num_workers, collate_fn=list, worker_init_fn=init
    )
    return loader


def _masked(samples: Sequence[Feature], seed: int | None) -> Sequence[object]:
    """Return samples whose tokens a collator masks at random."""
    from transformers import DataCollatorForLanguageModeling

    collator: Any = DataCollatorForLanguageModeling(micro_tokenizer(), seed=seed)
    return ComputedItems(len(samples), lambda item: collator([samples[item]]))
