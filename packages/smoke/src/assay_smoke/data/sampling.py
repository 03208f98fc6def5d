"""Checks data loading: order over ranks and after resumes, and random numbers of workers.

Workers are processes. Forked with equal generator states, they augment their samples alike. Seeded by worker
number alone, they repeat each epoch.
"""

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, product
from typing import Any

from assay.devices.torch_backend import seed_generators
from assay.errors import name_some
from assay.training.state.states import generator_states, restore_generators
from assay_smoke.data.protocols import (
    Feature,
    LoaderPlan,
    MakeDataset,
    OpenLoader,
    OpenRun,
    ResumePoint,
    Stateful,
)
from assay_smoke.data.verdict import DeclinedError, Fault, Subject, SubjectReport

LIBRARIES = ("numpy", "random", "torch")
# The name of the value of a dataset's item, in place of a library.
ITEM = "item"
NEW_IN_WORKERS = {name: f"workers draw different numbers from {name}" for name in LIBRARIES}
NEW_IN_EPOCHS = {name: f"epochs draw different numbers from {name}" for name in LIBRARIES}
REPEATABLE_NUMBERS = "the same seed draws the same numbers"
LOADER_PROPERTIES = (*NEW_IN_WORKERS.values(), *NEW_IN_EPOCHS.values(), REPEATABLE_NUMBERS)

NEW_IN_WORKERS[ITEM] = "items of different workers differ by their random numbers"
NEW_IN_EPOCHS[ITEM] = "items of different epochs differ by their random numbers"
DATASET_PROPERTIES = (NEW_IN_WORKERS[ITEM], NEW_IN_EPOCHS[ITEM], REPEATABLE_NUMBERS)

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


def _draw_numbers(item: int) -> list[int]:
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
    """Iterate the loader over two epochs with two workers, twice from the same seeds and once from others."""
    report = SubjectReport.promising(subject.name, LOADER_PROPERTIES)

    def record(rank: int, seed: int = _SEED) -> list[_Draw]:
        seed_generators(seed)
        items = ComputedItems(_NUM_ITEMS, _draw_numbers)
        with subject.called_for(f"{_NUM_ITEMS} items, {_NUM_WORKERS} workers, rank {rank}"):
            return _record(subject, open_loader, items, LIBRARIES, rank)

    draws, again, other_rank, other = record(0), record(0), record(1), record(0, _SEED + 1)
    report.judge(LOADER_PROPERTIES, [*_find_equal(draws), *_find_unrepeated(draws, again)])
    if _values(draws) == _values(other_rank):
        seeds = "all seeds" if _values(draws) == _values(other) else "equal seeds"
        report.note(f"ranks with {seeds} draw the same numbers in their workers")
    return report


def check_dataset(
    subject: Subject, make_dataset: MakeDataset, open_loader: OpenLoader
) -> SubjectReport:
    """Load a dataset of equal samples, whose items differ only by random numbers, twice from the same seeds."""
    report = SubjectReport.promising(subject.name, DATASET_PROPERTIES)
    # Long enough that equal maskings by chance are unlikely.
    ids = list(range(ord("a"), ord("z") + 1)) * 3

    def record() -> list[_Draw]:
        seed_generators(_SEED)
        samples = [
            Feature(input_ids=[*ids], attention_mask=[1] * len(ids)) for _ in range(_NUM_ITEMS)
        ]
        with subject.called_for(f"{_NUM_ITEMS} equal samples, {_NUM_WORKERS} workers"):
            dataset = make_dataset(samples)
            if len(dataset) != _NUM_ITEMS:
                raise subject.returned(f"{len(dataset)} items", f"{_NUM_ITEMS}, one per sample")
            items = ComputedItems(len(dataset), partial(_label, dataset))
            return _record(subject, open_loader, items, [ITEM])

    draws, again = record(), record()
    if len({draw.values[ITEM] for draw in draws}) == 1:
        equal = "equal items for equal samples: it draws no random numbers"
        raise subject.returned(equal, "a dataset whose items are random")
    report.judge(DATASET_PROPERTIES, [*_find_equal(draws), *_find_unrepeated(draws, again)])
    return report


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
        for item in chain.from_iterable(subject.iterate(loader, "", "a DataLoader")):
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
            reason = f"the second run has no item {draw.item} in epoch {draw.epoch}"
            yield Fault(REPEATABLE_NUMBERS, reason)
            continue
        for name, value in draw.values.items():
            if value != other.values[name]:
                source = f"for {ITEM} {draw.item}" if name == ITEM else f"from {name}"
                reason = f"two runs with equal seeds draw different numbers {source}"
                yield Fault(REPEATABLE_NUMBERS, reason, (draw.show(name), other.show(name)))


def _values(draws: Sequence[_Draw]) -> list[object]:
    return [draw.values for draw in draws]


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


EQUAL_STEPS = "every rank makes the same number of steps"
BATCH_SIZE = "no batch is larger than asked for"
ONCE = "every sample is seen once in an epoch"
NEW_ORDER = "shuffled epochs differ in order"
REPEATABLE = "the same seed gives the same order"
SEEDED = "another seed gives another order"
RESUMED = "a resumed run sees exactly what was left"

PROPERTIES = (EQUAL_STEPS, BATCH_SIZE, ONCE, NEW_ORDER, REPEATABLE, SEEDED, RESUMED)

# Fewer samples often have equal permutations by chance; 12 have once in 479,001,600.
FEWEST_TO_SHUFFLE = 12

# Samples, batch size, ranks, workers; smallest first. Some divide evenly, others do not.
_SHAPES = ((12, 1, 1, 0), (13, 1, 2, 0), (12, 3, 2, 0), (29, 4, 3, 0), (13, 2, 2, 2))
SAMPLER_PLANS = tuple(
    LoaderPlan(n, size, 0, ranks, workers, shuffle=shuffle, drop_last=drop_last)
    for n, size, ranks, workers in _SHAPES
    for shuffle in (True, False)
    for drop_last in (False, True)
    # Workers are processes, which are slow to start: one plan is enough.
    if not workers or (shuffle and not drop_last)
)

# Long and short samples in turn, so that batches differ in their number of samples.
_LENGTHS = (3, 60, 5, 8, 33, 1, 2, 50, 13, 21, 4, 40, 7, 9, 30, 6, 11)
BATCH_SAMPLER_PLANS = tuple(
    LoaderPlan(
        len(lengths), len(lengths), 0, ranks, shuffle=shuffle, drop_last=drop_last,
        lengths=lengths, tokens_per_batch=64,
    )
    for lengths, ranks in ((_LENGTHS[:12], 2), (_LENGTHS, 2), (_LENGTHS * 2, 3))
    for shuffle in (True, False)
    for drop_last in (False, True)
)  # fmt: skip


Epoch = list[list[int]]
Run = list[Epoch]


def check_sampling(
    subject: Subject, open_run: OpenRun, plans: Sequence[LoaderPlan] = SAMPLER_PLANS
) -> SubjectReport:
    """Run `open_run` for every plan, rank and epoch, and again from interruptions.

    A plan or resume that raises NotImplementedError is skipped and noted.
    """
    report = SubjectReport.promising(subject.name, PROPERTIES)
    declined: list[DeclinedError] = []
    for plan in plans:
        own = [replace(plan, rank=rank) for rank in range(plan.num_ranks)]
        try:
            by_rank = [_draw(subject, open_run, one)[0] for one in own]
        except DeclinedError as error:
            declined.append(error)
            continue
        for number in range(plan.num_epochs):
            epochs = [run[number] for run in by_rank]
            rows = [f"epoch {number}, rank {at}: {_show(one)}" for at, one in enumerate(epochs)]
            shown = (_case(plan), *rows)
            report.judge((EQUAL_STEPS, BATCH_SIZE), _find_wrong_batches(plan, epochs, shown))
            report.judge([ONCE], _find_lost_or_repeated(report, plan, epochs, shown))
        if plan.shuffle and plan.num_samples >= FEWEST_TO_SHUFFLE:
            other_plan, other = replace(plan, seed=plan.seed + 1), None
            try:
                other, _ = _draw(subject, open_run, other_plan)
                report.judge([SEEDED], _find_ignored_seed(plan, by_rank[0], other))
            except DeclinedError as error:
                declined.append(error)
            report.judge([NEW_ORDER], _find_repeated_order(plan, by_rank, other))
        again, _ = _draw(subject, open_run, plan)
        report.judge([REPEATABLE], _find_other_order(plan, by_rank[0], again))
        for one, run in zip(own, by_rank, strict=True):
            for at in _interruptions(one, run):
                try:
                    report.judge([RESUMED], _find_wrong_resume(subject, open_run, one, run, *at))
                except DeclinedError as error:
                    declined.append(error)
    report.waive_untried(declined)
    return report


def _draw(
    subject: Subject,
    open_run: OpenRun,
    plan: LoaderPlan,
    resumed: ResumePoint | None = None,
    stop: tuple[int, int] | None = None,
) -> tuple[Run, object]:
    """Draw the batches of one rank, as in a new process.

    resumed: start after these batches, with the generators of now, which a training script restores from
        its checkpoint after it has built its data loader.
    stop: end within this epoch after this number of its batches.
    Returns: the batches by epoch, and the state of the loop at its end if it has one.
    """
    restored = None if resumed is None else generator_states("cpu")
    seed_generators(plan.seed)
    first, last = resumed.epoch if resumed else 0, stop[0] if stop else plan.num_epochs - 1
    wanted = "an iterable of epochs, each an iterable of batches of sample numbers"
    epochs: Run = []
    most = 4 * plan.num_samples + 16
    with subject.called_for(_case(plan, resumed)):
        run = open_run(plan, resumed)
        if restored is not None:
            restore_generators(restored, "cpu")
        drawn = subject.iterate(run, "", wanted)
        for number, epoch in zip(range(first, last + 1), drawn, strict=False):
            batches = subject.iterate(epoch, " as an epoch", wanted)
            few = islice(batches, stop[1] if stop and number == last else most + 1)
            epochs.append([[*map(int, subject.iterate(one, " as a batch", wanted))] for one in few])
            if len(epochs[-1]) > most:
                long = f"an epoch of more than {most} batches for {plan.num_samples} samples"
                raise subject.returned(long, "epochs that end")
        state = copy.deepcopy(run.state_dict()) if isinstance(run, Stateful) else None
        is_too_long = stop is None and next(drawn, None) is not None
    if resumed is None and (is_too_long or len(epochs) != last + 1):
        given = f"{'more than ' * is_too_long}{len(epochs)} epochs of {last + 1}"
        raise subject.returned(f"{given} for {_case(plan)}", wanted)
    if is_too_long:
        epochs.append([])
    return epochs, state


def _case(plan: LoaderPlan, resumed: ResumePoint | None = None) -> str:
    """Describe the plan briefly."""
    limit = f"at most {plan.tokens_per_batch} tokens" if plan.tokens_per_batch else plan.batch_size
    parts = [
        f"{plan.num_samples} samples",
        f"batches of {limit}",
        f"{plan.num_ranks} rank{'s' if plan.num_ranks > 1 else ''}",
        f"{plan.num_workers} workers" if plan.num_workers else "",
        "shuffled" if plan.shuffle else "in order",
        "drop_last" if plan.drop_last else "",
        f"seed {plan.seed}",
        f"resumed in epoch {resumed.epoch}, batch {resumed.num_batches}" if resumed else "",
    ]
    return ", ".join(filter(None, parts))


def _show(epoch: Epoch, most: int = 8) -> str:
    """Show the batches of an epoch in a line."""
    shown = " ".join(str(batch) for batch in epoch[:most])
    rest = len(epoch) - most
    return f"{shown} and {rest} more" if rest > 0 else shown or "no batch"


def _find_wrong_batches(
    plan: LoaderPlan, by_rank: Sequence[Epoch], shown: Sequence[str]
) -> Iterator[Fault]:
    """Find unequal numbers of steps, and batches that are too large."""
    steps = [len(epoch) for epoch in by_rank]
    if len(set(steps)) > 1:
        wrong = f"the ranks make {_list_numbers(steps)} steps"
        yield Fault(EQUAL_STEPS, f"{wrong}: the first collective after the shortest hangs", shown)
    for batch in chain(*by_rank):
        if len(batch) > plan.batch_size:
            reason = f"a batch has {len(batch)} samples instead of {plan.batch_size}"
            yield Fault(BATCH_SIZE, reason, shown)
        elif plan.tokens_per_batch and len(batch) > 1:  # a single sample may exceed the budget
            tokens = sum(plan.lengths[sample] for sample in batch if sample < plan.num_samples)
            if tokens > plan.tokens_per_batch:
                yield Fault(BATCH_SIZE, f"batch {batch} has {tokens} tokens", shown)


def _find_lost_or_repeated(
    report: SubjectReport, plan: LoaderPlan, by_rank: Sequence[Epoch], shown: Sequence[str]
) -> Iterator[Fault]:
    ranks: dict[int, list[int]] = {sample: [] for sample in range(plan.num_samples)}
    for rank, epoch in enumerate(by_rank):
        for sample in chain(*epoch):
            ranks.setdefault(sample, []).append(rank)
    unknown = sorted(ranks.keys() - set(range(plan.num_samples)))
    lost = [sample for sample, seen in ranks.items() if not seen]
    repeated = [sample for sample, seen in sorted(ranks.items()) if len(seen) > 1]
    # A batch sampler counts in tokens, as its budget does.
    budget, unit = plan.tokens_per_batch, "tokens" if plan.tokens_per_batch else "samples"
    sizes = [min(length, budget) for length in plan.lengths] if budget else [1] * plan.num_samples
    num_lost = sum(sizes[sample] for sample in lost)
    num_repeats = sum(
        sizes[sample] * (len(ranks[sample]) - 1) for sample in repeated if sample not in unknown
    )
    excused, faults = _count_excused(plan), []
    excused_lost, excused_repeats = (excused, 0) if plan.drop_last else (0, excused)
    if num_lost > excused_lost:
        allowed = f"; drop_last may leave out {excused} {unit} here" if plan.drop_last else ""
        incomplete = plan.num_samples % (plan.num_ranks * plan.batch_size)
        if not (plan.drop_last or budget or num_repeats) and num_lost == incomplete:
            allowed = ": as many as the incomplete last batch has, although drop_last is not set"
        faults.append(f"{_name_samples(lost)} never seen{allowed}")
    if num_repeats > excused_repeats:
        first = f"sample {repeated[0]} by rank {_list_numbers(ranks[repeated[0]])}"
        faults.append(f"{_name_samples(repeated)} seen more than once ({first})")
    if unknown:
        faults = [f"{_name_samples(unknown)} not in the dataset"]
    if faults:
        yield Fault(ONCE, "; ".join(faults), shown)
    elif num_repeats:
        report.note("samples are repeated to fill the last batch of every rank")


def _list_numbers(numbers: Sequence[int]) -> str:
    """List numbers, at most as many as fit a line."""
    return name_some([*map(str, numbers)], 12)


def _name_samples(samples: Sequence[int]) -> str:
    return (
        f"sample {samples[0]} is" if len(samples) == 1 else f"samples {_list_numbers(samples)} are"
    )


def _count_excused(plan: LoaderPlan) -> int:
    """Return how many samples or, with a budget, tokens may be dropped or repeated to even out the ranks."""
    if plan.tokens_per_batch:
        # Fewer whole batches than ranks. With drop_last, also an incomplete last batch.
        return (plan.num_ranks - 1 + plan.drop_last) * plan.tokens_per_batch
    whole = plan.num_ranks * plan.batch_size
    if plan.drop_last:
        # With an iterable dataset, each worker drops its own last batch.
        whole *= max(1, plan.num_workers)
    return whole - 1 if plan.num_samples % whole else 0


def _find_repeated_order(
    plan: LoaderPlan, by_rank: Sequence[Run], other: Run | None
) -> Iterator[Fault]:
    """Find epochs of equal order. other: rank 0 with the next seed, to tell apart what hides the epoch."""
    orders = [[[*chain(*run[epoch])] for run in by_rank] for epoch in range(plan.num_epochs)]
    for later, earlier in ((b, a) for b in range(plan.num_epochs) for a in range(b)):
        if orders[later] == orders[earlier]:
            reason = f"epoch {later} has the order of epoch {earlier}"
            if other is not None and other[later] == other[earlier]:
                reason += ": set_epoch is not called or does not reach the sampler"
            elif other is not None:
                reason += (
                    f" with seed {plan.seed}, but not with seed {plan.seed + 1}: the epoch has no effect for"
                    " some seeds, as in seed * epoch"
                )
            shown = [f"epoch {one}, rank 0: {_show(by_rank[0][one])}" for one in (earlier, later)]
            yield Fault(NEW_ORDER, reason, (_case(plan), *shown))


def _find_ignored_seed(plan: LoaderPlan, run: Run, other: Run) -> Iterator[Fault]:
    if other == run:
        reason = f"seeds {plan.seed} and {plan.seed + 1} give the same order: the seed is not used"
        yield Fault(SEEDED, reason, (_case(plan), f"epoch 0, rank 0, either seed: {_show(run[0])}"))


def _find_other_order(plan: LoaderPlan, run: Run, again: Run) -> Iterator[Fault]:
    for epoch, (first, second) in enumerate(zip(run, again, strict=True)):
        if first != second:
            reason = f"two runs with seed {plan.seed} differ from epoch {epoch} on"
            runs = {"first": first, "second": second}
            shown = [f"epoch {epoch}, rank 0, {name} run: {_show(e)}" for name, e in runs.items()]
            yield Fault(REPEATABLE, reason, (_case(plan), *shown))


def _interruptions(plan: LoaderPlan, run: Run) -> Iterator[tuple[int, int]]:
    """Yield epochs with numbers of batches seen: after the first, in the middle, before the last.

    With workers, interrupt only once, because every epoch starts new processes. Without shuffling,
    interrupt only in the middle.
    """
    if plan.num_workers:
        yield 1, len(run[1]) // 2
        return
    for number, epoch in enumerate(run):
        seen = {len(epoch) // 2}
        if plan.shuffle:
            seen |= {0 if number else 1, 1, len(epoch) - 1}
        # The middle first: at the begin and the end, several mistakes look alike.
        in_order = sorted(seen, key=lambda count: (count != len(epoch) // 2, count))
        yield from ((number, count) for count in in_order if 0 <= count < len(epoch))


def _find_wrong_resume(
    subject: Subject, open_run: OpenRun, plan: LoaderPlan, run: Run, epoch: int, num_batches: int
) -> Iterator[Fault]:
    """Interrupt a run, resume it, and find epochs that differ.

    The global generators are restored to the interruption, as checkpoints restore them. An order drawn
    from them then changes.
    """
    _, state = _draw(subject, open_run, plan, stop=(epoch, num_batches))
    point = ResumePoint(epoch, num_batches, state)
    resumed, _ = _draw(subject, open_run, plan, point)
    expected = [run[epoch][num_batches:], *run[epoch + 1 :]]
    case = f"{_case(plan, point)}, rank {plan.rank}"
    if len(resumed) != len(expected):
        reason = f"makes {'more' if len(resumed) > len(expected) else 'fewer'} epochs than are left"
        if resumed and run[0] != run[epoch] and resumed[0] in (run[0], run[0][num_batches:]):
            reason = "starts again at epoch 0"
        rows = [f"resumed: {_show(one)}" for one in resumed[: len(expected)]]
        yield Fault(RESUMED, f"a run resumed in epoch {epoch} {reason}", (case, *rows))
        return
    for number, (own, actual) in enumerate(zip(expected, resumed, strict=True), epoch):
        if own != actual:
            reason = f"a run resumed in epoch {epoch} {_describe(run, point, number, actual)}"
            shown = (f"rest of epoch {number}: {_show(own)}", f"resumed:         {_show(actual)}")
            yield Fault(RESUMED, reason, (case, *shown))


def _count_batches(number: int) -> str:
    return "1 batch" if number == 1 else f"{number} batches"


def _describe(run: Run, point: ResumePoint, number: int, actual: Epoch) -> str:
    """Describe the epoch `number` of a resumed run, by a known mistake if one fits."""
    later, seen = number > point.epoch, point.num_batches
    if later and seen and actual == run[number][seen:]:
        return f"also skips {_count_batches(seen)} of epoch {number}"
    for other, epoch in enumerate(run):
        if other != number and actual == (epoch if later else epoch[seen:]):
            return f"has the order of epoch {other} in epoch {number}"
    if not later and actual == run[number]:
        return "restarts the epoch" if seen > 1 else "restarts the epoch, or repeats its last batch"
    for again in range(1, 0 if later else seen):
        if actual == run[number][seen - again :]:
            return f"repeats {_count_batches(again)}"
    before = [] if later else run[number][:seen]
    given, whole = (Counter(chain(*epoch)) for epoch in ([*before, *actual], run[number]))
    changed = {
        "never": sorted((whole - given).elements()),
        "again": sorted((given - whole).elements()),
    }
    parts = [f"{_list_numbers(samples)} {how}" for how, samples in changed.items() if samples]
    how = f": {', '.join(parts)}" if parts else ", in another order"
    return f"sees other samples in epoch {number}{how}"
