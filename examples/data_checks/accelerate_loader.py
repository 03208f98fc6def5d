"""Accelerate's data loader as code for `assay smoke data`.

assay smoke data --sampler examples/data_checks/accelerate_loader.py:seeded passes; `:unseeded`, the default, FAILs.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from accelerate.data_loader import prepare_data_loader, skip_first_batches
from torch.utils.data import DataLoader

from assay_smoke.data.protocols import LoaderPlan, ResumePoint

Epochs = Iterator[Iterable[Sequence[int]]]


def epochs(plan: LoaderPlan, resumed: ResumePoint | None, seeded: dict[str, Any]) -> Epochs:
    """Yield the remaining epochs, the first without its seen batches."""
    samples: Any = range(plan.num_samples)
    opened: Any = DataLoader(
        samples,
        plan.batch_size,
        plan.shuffle,
        num_workers=plan.num_workers,
        drop_last=plan.drop_last,
        collate_fn=list,
    )
    ranks = {"num_processes": plan.num_ranks, "process_index": plan.rank}
    loader: Any = prepare_data_loader(opened, put_on_device=False, **ranks, **seeded)
    first, seen = (resumed.epoch, resumed.num_batches) if resumed else (0, 0)
    for epoch in range(first, plan.num_epochs):
        loader.set_epoch(epoch)
        yield skip_first_batches(loader, seen) if seen and epoch == first else loader


def seeded(plan: LoaderPlan, resumed: ResumePoint | None) -> Epochs:
    """Draw the order from a sampler that is seeded by epoch."""
    return epochs(plan, resumed, {"use_seedable_sampler": True, "data_seed": plan.seed})


def unseeded(plan: LoaderPlan, resumed: ResumePoint | None) -> Epochs:
    """Draw the order from torch's global generator, as by default."""
    return epochs(plan, resumed, {})
