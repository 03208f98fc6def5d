"""DataLoaders with the seeding of workers that torch and transformers have, and seeded masking."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from assay_smoke.data.libraries.installed import library_subject
from assay_smoke.data.protocols import Feature, MakeDataset, OpenLoader
from assay_smoke.data.running_code import Subject
from assay_smoke.data.tokens.micro_tokenizer import micro_tokenizer


def library_loaders() -> list[tuple[Subject, OpenLoader]]:
    """Each with its name and version."""
    return [
        (library_subject("torch", "DataLoader"), torch_loader),
        (library_subject("transformers", "seed_worker, as in its Trainer"), transformers_loader),
    ]


def library_datasets() -> list[tuple[Subject, MakeDataset]]:
    """Random masking by transformers, with and without a seed of its own."""
    what = "DataCollatorForLanguageModeling(mlm=True{})"
    return [
        (library_subject("transformers", what.format("")), partial(_masked, seed=None)),
        (library_subject("transformers", what.format(", seed=0")), partial(_masked, seed=0)),
    ]


def torch_loader(
    dataset: Sequence[Sequence[int]], num_workers: int, _rank: int
) -> Iterable[Iterable[object]]:
    """Workers seeded as torch does it."""
    from torch.utils.data import DataLoader

    given: Any = dataset
    loader: Iterable[Iterable[object]] = DataLoader(
        given, 2, shuffle=False, num_workers=num_workers, collate_fn=list
    )
    return loader


def transformers_loader(
    dataset: Sequence[Sequence[int]], num_workers: int, rank: int
) -> Iterable[Iterable[object]]:
    """Workers seeded by transformers."""
    from torch.utils.data import DataLoader
    from transformers.trainer_utils import seed_worker

    given: Any = dataset
    init = partial(seed_worker, num_workers=num_workers, rank=rank)
    loader: Iterable[Iterable[object]] = DataLoader(
        given, 2, num_workers=num_workers, collate_fn=list, worker_init_fn=init
    )
    return loader


class _Masked(Sequence[Any]):
    """Samples of which a collator masks tokens at random."""

    def __init__(self, samples: Sequence[Feature], collator: Any) -> None:  # noqa: ANN401
        self._samples = samples
        self._collator = collator

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, item: Any) -> Any:  # noqa: ANN401
        return self._collator([self._samples[item]])


def _masked(samples: Sequence[Feature], seed: int | None) -> Sequence[object]:
    from transformers import DataCollatorForLanguageModeling

    return _Masked(samples, DataCollatorForLanguageModeling(micro_tokenizer(), seed=seed))
