"""Assigns devices to items: the largest item first, on devices that no other item uses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Packing(Generic[T]):
    """Hands out devices to items as devices become free."""

    items: Sequence[T]
    cards_of: Callable[[T], int]
    """Returns the number of devices of an item. The ranks of a larger item share all devices."""
    num_devices: int
    running: dict[T, tuple[int, ...]] = field(default_factory=dict)
    """The devices of each running item."""
    _waiting: list[T] = field(init=False)
    _free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._waiting = sorted(self.items, key=self.cards_of, reverse=True)
        self._free = list(range(self.num_devices))

    def start(self) -> list[tuple[T, tuple[int, ...]]]:
        """Return the items that can run now with their devices, which they keep until `finish`."""
        started = []
        for item in list(self._waiting):
            needed = min(self.cards_of(item), self.num_devices)
            if needed > len(self._free):
                continue
            devices, self._free = tuple(self._free[:needed]), self._free[needed:]
            self._waiting.remove(item)
            self.running[item] = devices
            started.append((item, devices))
        return started

    def finish(self, item: T) -> None:
        """Take the devices of an item back."""
        self._free = sorted([*self._free, *self.running.pop(item)])
