"""Samplers and data loaders of torch and accelerate over ranks."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from assay_smoke.data.libraries.installed import is_installed, library_subject
from assay_smoke.data.properties import Subject
from assay_smoke.data.protocols import LoaderPlan, OpenRun, ResumePoint


def library_samplers() -> list[tuple[Subject, OpenRun]]:
    """Return each subject with its data loop."""
    found: list[tuple[Subject, OpenRun]] = [
        (library_subject("torch", "DistributedSampler"), distributed_sampler)
    ]
    if is_installed("accelerate"):
        found += [
            (
                library_subject("accelerate", "skip_first_batches, use_seedable_sampler"),
                accelerate_seedable,
            ),
            (
                library_subject("accelerate", "skip_first_batches, as by default"),
                accelerate_default,
            ),
        ]
    return found


def distributed_sampler(
    plan: LoaderPlan, resumed: ResumePoint | None
) -> Iterator[Iterable[Sequence[int]]]:
    """Run torch's DistributedSampler. It cannot resume, so seen batches are drawn and discarded."""
    from torch.utils.data import DataLoader, DistributedSampler

    samples = range(plan.num_samples)
    sampler: Any = DistributedSampler(
        samples,  # type: ignore[arg-type] # any sequence
        num_replicas=plan.num_ranks,
        rank=plan.rank,
        shuffle=plan.shuffle,
        seed=plan.seed,
        drop_last=plan.drop_last,
    )
    loader: Any = DataLoader(
        samples,  # type: ignore[arg-type]
        plan.batch_size,
        sampler=sampler,
        num_workers=plan.num_workers,
        drop_last=plan.drop_last,
        collate_fn=list,
    )

    def epochs() -> Iterator[Iterable[Sequence[int]]]:
        for epoch, seen in epochs_left(plan, resumed):
            sampler.set_epoch(epoch)
            yield islice(iter(loader), seen, None)

    return epochs()


def epochs_left(plan: LoaderPlan, resumed: ResumePoint | None) -> Iterator[tuple[int, int]]:
    """Yield the remaining epochs with their numbers of seen batches."""
    first, seen = (resumed.epoch, resumed.num_batches) if resumed else (0, 0)
    yield from ((epoch, seen if epoch == first else 0) for epoch in range(first, plan.num_epochs))


def accelerate_seedable(
    plan: LoaderPlan, resumed: ResumePoint | None
) -> Iterator[Iterable[Sequence[int]]]:
    """Run accelerate's loader with a sampler that is seeded by epoch."""
    return _accelerate(plan, resumed, {"use_seedable_sampler": True, "data_seed": plan.seed})


def accelerate_default(
    plan: LoaderPlan, resumed: ResumePoint | None
) -> Iterator[Iterable[Sequence[int]]]:
    """Run accelerate's loader with default options, which draws the order from torch's global generator."""
    return _accelerate(plan, resumed, {})


def _accelerate(
    plan: LoaderPlan, resumed: ResumePoint | None, options: dict[str, Any]
) -> Iterator[Iterable[Sequence[int]]]:
    from accelerate.data_loader import prepare_data_loader, skip_first_batches
    from torch.utils.data import DataLoader

    plain: Any = DataLoader(
        range(plan.num_samples),  # type: ignore[arg-type] # any sequence
        plan.batch_size,
        shuffle=plan.shuffle,
        num_workers=plan.num_workers,
        drop_last=plan.drop_last,
        collate_fn=list,
    )
    loader: Any = prepare_data_loader(
        plain, num_processes=plan.num_ranks, process_index=plan.rank, put_on_device=False, **options
    )

    def epochs() -> Iterator[Iterable[Sequence[int]]]:
        for epoch, seen in epochs_left(plan, resumed):
            loader.set_epoch(epoch)
            yield skip_first_batches(loader, seen) if seen else loader

    return epochs()
