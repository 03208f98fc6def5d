"""Devices are handed out largest first, and none to two at once."""

from collections.abc import Mapping

import pytest

from assay_smoke.session.packing import Packing


def pack(cards: Mapping[str, int], num_devices: int) -> Packing[str]:
    return Packing(list(cards), cards.__getitem__, num_devices)


def test_largest_begins_first_and_small_ones_fill_what_is_left() -> None:
    packing = pack({"one": 1, "two": 2, "other": 1, "four": 4}, 4)

    assert packing.start() == [("four", (0, 1, 2, 3))]
    assert packing.start() == []
    packing.finish("four")
    assert packing.start() == [("two", (0, 1)), ("one", (2,)), ("other", (3,))]
    packing.finish("one")
    packing.finish("two")
    assert packing.start() == []
    assert packing.running == {"other": (3,)}


@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
def test_every_item_runs_once_on_devices_of_its_own(num_devices: int) -> None:
    cards = {str(number): 1 + number % 4 for number in range(20)}
    packing = pack(cards, num_devices)
    ran: list[str] = []
    while started := packing.start() or list(packing.running.items()):
        used = [device for devices in packing.running.values() for device in devices]
        assert len(used) == len(set(used))
        assert set(used) <= set(range(num_devices))
        item, devices = started[0]
        assert len(devices) == min(cards[item], num_devices)
        ran.append(item)
        packing.finish(item)

    assert sorted(ran, key=int) == list(cards)
