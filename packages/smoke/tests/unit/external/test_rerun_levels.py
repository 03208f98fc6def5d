"""Repeated and equivalent runs: limits, unchecked parts, and the precision of logged losses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from assay.runs import SilentProgress
from assay_smoke.external.rerun_levels import (
    judge_equivalent,
    measure_apart,
    measure_spread,
    unit_in_log,
)
from assay_smoke.external.runs import Cycle

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


def test_two_ends_are_apart_by_a_share_of_what_training_changed() -> None:
    names = [str(number) for number in range(12)]
    base = dict.fromkeys(["frozen", *names], torch.zeros(2))
    end = dict.fromkeys(names, torch.tensor([3.0, 4.0])) | {"frozen": torch.zeros(2)}
    one = end | {"0": torch.tensor([0.0, 9.0])}
    several = one | {"1": torch.tensor([3.0, 4.5]), "2": torch.tensor([3.0, 4.5])}

    assert measure_apart(end, end, base) == 0
    assert measure_apart(one, end, base) == 0
    assert measure_apart(several, end, base) == pytest.approx(0.1)
    assert measure_apart({"0": end["0"]}, end, base) == float("inf")
    broken = end | {"0": torch.tensor([3.0, float("nan")])}
    assert measure_apart(broken, end, base) == float("inf")


def test_split_is_unchecked_without_a_whole_last_checkpoint() -> None:
    library = SimpleNamespace(split_otherwise=lambda: "another split", steps=9)
    launch: Any = SimpleNamespace(library=library)

    level = judge_equivalent(Cycle(launch, SilentProgress())).level

    assert level.verdict is None
    assert (level.model_extra or {})["unchecked"] is True
    assert "it was not checked whether training depends on the split" in str(level.reason)


@pytest.mark.parametrize(
    ("value", "logged", "unit"),
    [
        (2.114, [2.114, 1.442, 10.23], 1e-3),  # four significant digits
        (10.23, [2.114, 0.5123, 10.23], 1e-2),
        (10.2345, [10.2345, 2.1145], 1e-4),  # four decimals
        (2.1145, [10.2345, 2.1145], 1e-4),
        (2.5e-5, [2.5e-5, 1.25e-5], 1e-7),
        (0.0, [0.0, 0.25], 1e-2),
        (2.0, [float("nan"), 2.5], 1e-1),
    ],
)
def test_the_unit_is_that_of_the_last_digit_that_is_logged(
    value: float, logged: list[float], unit: float
) -> None:
    assert unit_in_log(value, logged) == pytest.approx(unit)
