"""Devices go to the largest item first, and never to two items at once."""

import pytest

from assay_smoke.session.side_by_side import Packing


def test_largest_begins_first_and_small_ones_fill_what_is_left() -> None:
    packing = Packing([1, 2, 1, 4], 4)

    assert packing.start() == [(3, (0, 1, 2, 3))]
    assert packing.start() == []
    packing.finish(3)
    assert packing.start() == [(1, (0, 1)), (0, (2,)), (2, (3,))]
    packing.finish(0)
    packing.finish(1)
    assert packing.start() == []
    assert packing.running == {2: (3,)}


@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
def test_every_item_runs_once_on_devices_of_its_own(num_devices: int) -> None:
    cards = [1 + number % 4 for number in range(20)]
    packing = Packing(cards, num_devices)
    ran: list[int] = []
    while started := packing.start() or list(packing.running.items()):
        used = [device for devices in packing.running.values() for device in devices]
        assert len(used) == len(set(used))
        assert set(used) <= set(range(num_devices))
        item, devices = started[0]
        assert len(devices) == min(cards[item], num_devices)
        ran.append(item)
        packing.finish(item)

    assert sorted(ran) == list(range(20))
