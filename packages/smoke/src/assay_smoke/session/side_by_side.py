"""Runs the items of a session in turn, or side by side in processes with their own devices."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from assay.errors import AssayError
from assay.runs import Progress, RemoteFunction, ask
from assay.runs.processes.groups import interrupt_all
from assay.verdicts import Outcome
from assay_smoke.machine.failures import failed_part
from assay_smoke.session.items import SessionItem, run_with_retry
from assay_smoke.session.results import CaseResult


@dataclass(frozen=True, slots=True)
class ItemRequest:
    """An item to run in its own process."""

    item: SessionItem
    folder: Path


_RUN_ITEM: RemoteFunction[ItemRequest, CaseResult] = RemoteFunction(
    "assay_smoke.session.side_by_side:run_item"
)


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices of this machine."""

    count: int
    visible: str
    """Environment variable with the numbers of the devices that a process may use."""


@dataclass(slots=True)
class Packing:
    """Hands out devices to items as devices become free, to the largest item first."""

    cards: Sequence[int]
    """Number of devices of each item. The ranks of a larger item share all devices."""
    num_devices: int
    running: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The devices of each running item, by its number."""
    _waiting: list[int] = field(init=False)
    _free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        numbers = range(len(self.cards))
        self._waiting = sorted(numbers, key=self.cards.__getitem__, reverse=True)
        self._free = list(range(self.num_devices))

    def start(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return the items that can run now with their devices, which they keep until `finish`."""
        started = []
        for number in list(self._waiting):
            needed = min(self.cards[number], self.num_devices)
            if needed > len(self._free):
                continue
            devices, self._free = tuple(self._free[:needed]), self._free[needed:]
            self._waiting.remove(number)
            self.running[number] = devices
            started.append((number, devices))
        return started

    def finish(self, number: int) -> None:
        """Take the devices of an item back."""
        self._free = sorted([*self._free, *self.running.pop(number)])


def run_items(
    items: Sequence[SessionItem], devices: Devices | None, folder: Path, progress: Progress
) -> Iterator[CaseResult]:
    """Yield the result of each item when it ends.

    devices: None runs the items in turn on shared devices.
    """
    if devices is not None and len(items) > 1:
        yield from _run_side_by_side(items, devices, folder, progress)
        return
    for item in items:
        yield run_with_retry(item, folder, progress)


def _run_side_by_side(
    items: Sequence[SessionItem], devices: Devices, folder: Path, progress: Progress
) -> Iterator[CaseResult]:
    packing = Packing([item.num_cards or devices.count for item in items], devices.count)
    running: dict[Future[CaseResult], int] = {}
    with ThreadPoolExecutor(devices.count) as pool:
        try:
            while True:
                for number, cards in packing.start():
                    visible = {devices.visible: ",".join(map(str, cards))}
                    task = pool.submit(_run_beside, items[number], visible, folder, progress)
                    running[task] = number
                if not running:
                    return
                for task in wait(running, return_when=FIRST_COMPLETED).done:
                    packing.finish(running.pop(task))
                    yield task.result()
        except BaseException:
            interrupt_all()
            raise


def _run_beside(
    item: SessionItem, visible: dict[str, str], folder: Path, progress: Progress
) -> CaseResult:
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    request = ItemRequest(item, folder)
    begun = time.monotonic()
    try:
        return ask(_RUN_ITEM, request, logs, name=item.name, progress=progress, environment=visible)
    except AssayError as error:  # the process was killed, for example for lack of memory
        return CaseResult(
            name=item.name,
            outcome=Outcome.FAIL,
            seconds=time.monotonic() - begun,
            reason=f"run: {error}",
            infrastructure=failed_part(str(error)),
            command=item.command,
            folder=f"cases/{item.name}",
        )


def run_item(request: ItemRequest, progress: Progress) -> CaseResult:
    """Run one item in this process."""
    return run_with_retry(request.item, request.folder, progress)
