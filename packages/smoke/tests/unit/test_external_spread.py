"""What a resumed run is held to where two uninterrupted ones differ."""

import pytest
import torch

from assay_smoke.external.spread import measure_spread

END = {"a": torch.tensor([3.0, 4.0])}
NEAR = {"a": torch.tensor([3.0, 4.001])}
MIDDLE = {"a": torch.tensor([3.0, 3.0])}
WHOLE = [4.0, 3.0, 2.0, 1.0]


def test_steps_that_agree_by_luck_are_no_measure() -> None:
    # The repeated run differs in the second step alone, and not in those that were resumed.
    losses = {"uninterrupted": WHOLE, "repeated": [4.0, 3.0001, 2.0, 1.0], "resumed": [2.0, 1.0001]}
    spread = measure_spread(
        losses, {"uninterrupted": END, "repeated": NEAR, "resumed": NEAR}, MIDDLE
    )
    assert spread.losses.value < 5
    assert spread.ends.value == pytest.approx(1.0)
    assert spread.moved == pytest.approx(0.2)


def test_losses_are_held_to_no_more_than_they_are_logged_to() -> None:
    losses = {"uninterrupted": WHOLE, "repeated": WHOLE, "resumed": [2.0, 1.0 + 2**-23]}
    spread = measure_spread(
        losses, {"uninterrupted": END, "repeated": NEAR, "resumed": END}, MIDDLE
    )
    assert spread.losses.value < 2
