"""Records the batches of a data loop."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from assay_smoke.data.checked_code import Subject
from assay_smoke.data.order.generators import GeneratorStates, seed_generators
from assay_smoke.data.protocols import LoaderPlan, OpenRun, ResumePoint, Stateful

Batch = list[int]
Epoch = list[Batch]

_EPOCHS_WANTED = "an iterable of epochs, each an iterable of batches of sample numbers"


def record_run(
    subject: Subject,
    open_run: OpenRun,
    plan: LoaderPlan,
    resumed: ResumePoint | None = None,
    restored: GeneratorStates | None = None,
) -> list[Epoch]:
    """Return the batches of one rank from the resumed epoch to the last, as in a new process.

    restored: generator states, set after the loop is open, as a training script loads a checkpoint
        after it has built its data loader.
    """
    seed_generators(plan.seed)
    num_epochs = plan.num_epochs - (resumed.epoch if resumed else 0)
    with subject.called_for(describe_case(plan, resumed)):
        run = open_run(plan, resumed)
        if restored is not None:
            restored.restore()
        epochs = [
            list(_batches_of(subject, epoch, plan)) for epoch in islice(iter(run), num_epochs)
        ]
    if len(epochs) != num_epochs:
        raise subject.returned(f"{len(epochs)} epochs of {num_epochs}", _EPOCHS_WANTED)
    return epochs


def interrupt_run(
    subject: Subject, open_run: OpenRun, plan: LoaderPlan, epoch: int, num_batches: int
) -> tuple[ResumePoint, GeneratorStates]:
    """Draw `num_batches` batches of `epoch`. Return the point and the generator states."""
    seed_generators(plan.seed)
    with subject.called_for(describe_case(plan, None)):
        run = open_run(plan, None)
        epochs = iter(run)
        for _ in range(epoch):
            for _batch in _batches_of(subject, next(epochs), plan):
                pass
        batches = _batches_of(subject, next(epochs), plan)
        for _ in range(num_batches):
            next(batches)
        state = copy.deepcopy(run.state_dict()) if isinstance(run, Stateful) else None
    return ResumePoint(epoch, num_batches, state), GeneratorStates.current()


def _batches_of(
    subject: Subject, epoch: Iterable[Sequence[int]], plan: LoaderPlan
) -> Iterator[Batch]:
    """Yield batches as lists of numbers. Raises: RaisedError for an endless epoch."""
    most = 4 * plan.num_samples + 16
    for number, batch in enumerate(epoch):
        if number == most:
            raise subject.returned(
                f"an epoch of more than {most} batches for {plan.num_samples} samples",
                "epochs that end",
            )
        yield [int(sample) for sample in batch]


def describe_case(plan: LoaderPlan, resumed: ResumePoint | None = None) -> str:
    """Describe the plan briefly."""
    batches = f"batches of {plan.batch_size}"
    if plan.tokens_per_batch:
        batches = f"batches of at most {plan.tokens_per_batch} tokens"
    parts = [
        f"{plan.num_samples} samples",
        batches,
        f"{plan.num_ranks} rank{'s' if plan.num_ranks > 1 else ''}",
        f"{plan.num_workers} workers" if plan.num_workers else "",
        "shuffled" if plan.shuffle else "in order",
        "drop_last" if plan.drop_last else "",
        f"seed {plan.seed}",
        f"resumed after {resumed.num_batches} batches of epoch {resumed.epoch}" if resumed else "",
    ]
    return ", ".join(filter(None, parts))


def show_epoch(epoch: Epoch, most: int = 8) -> str:
    """Show the batches of an epoch in a line."""
    shown = " ".join(str(batch) for batch in epoch[:most])
    rest = len(epoch) - most
    return f"{shown} and {rest} more" if rest > 0 else shown or "no batch"
