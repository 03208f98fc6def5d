"""Samplers and data loaders of torch and accelerate over ranks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from assay_smoke.data.libraries.installed import is_installed, library_subject
from assay_smoke.data.properties import Subject
from assay_smoke.data.protocols import LoaderPlan, OpenRun, ResumePoint

Epochs = Iterator[Iterable[Sequence[int]]]


def library_samplers() -> list[tuple[Subject, OpenRun]]:
    """Return each subject with its data loop."""
    found: list[tuple[Subject, OpenRun]] = [
        (library_subject("torch", "DistributedSampler"), _distributed_sampler)
    ]
    if is_installed("accelerate"):
        subject = library_subject("accelerate", "skip_first_batches, use_seedable_sampler")
        found.append((subject, partial(_accelerate, is_seedable=True)))
        subject = library_subject("accelerate", "skip_first_batches, as by default")
        found.append((subject, _accelerate))
    return found


def _distributed_sampler(plan: LoaderPlan, resumed: ResumePoint | None) -> Epochs:
    """Run torch's DistributedSampler. It cannot resume, so seen batches are drawn and discarded."""
    from torch.utils.data import DistributedSampler

    sampler: Any = DistributedSampler(
        range(plan.num_samples),  # type: ignore[arg-type] # any sequence
        num_replicas=plan.num_ranks,
        rank=plan.rank,
        shuffle=plan.shuffle,
        seed=plan.seed,
        drop_last=plan.drop_last,
    )
    loader = _open_loader(plan, sampler=sampler)
    return _epochs(plan, resumed, sampler.set_epoch, lambda seen: islice(iter(loader), seen, None))


def _accelerate(
    plan: LoaderPlan, resumed: ResumePoint | None, *, is_seedable: bool = False
) -> Epochs:
    """Run accelerate's loader. By default it draws the order from torch's global generator.

    is_seedable: use a sampler that is seeded by epoch.
    """
    from accelerate.data_loader import prepare_data_loader, skip_first_batches

    loader: Any = prepare_data_loader(
        _open_loader(plan, shuffle=plan.shuffle),
        num_processes=plan.num_ranks,
        process_index=plan.rank,
        put_on_device=False,
        **({"use_seedable_sampler": True, "data_seed": plan.seed} if is_seedable else {}),
    )
    return _epochs(
        plan,
        resumed,
        loader.set_epoch,
        lambda seen: skip_first_batches(loader, seen) if seen else loader,
    )


def _open_loader(plan: LoaderPlan, **order: object) -> Any:  # noqa: ANN401 - of torch
    from torch.utils.data import DataLoader

    samples: Any = range(plan.num_samples)
    options: Any = {"num_workers": plan.num_workers, "drop_last": plan.drop_last, **order}
    return DataLoader(samples, plan.batch_size, collate_fn=list, **options)


def _epochs(
    plan: LoaderPlan,
    resumed: ResumePoint | None,
    set_epoch: Callable[[int], None],
    skip: Callable[[int], Iterable[Sequence[int]]],
) -> Epochs:
    """Yield the remaining epochs, the first without its seen batches."""
    first, seen = (resumed.epoch, resumed.num_batches) if resumed else (0, 0)
    for epoch in range(first, plan.num_epochs):
        set_epoch(epoch)
        yield skip(seen if epoch == first else 0)
