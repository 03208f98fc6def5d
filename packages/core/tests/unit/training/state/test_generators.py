import random
from pathlib import Path

import numpy as np
import torch

from assay.training.state.files import read_state, write_state
from assay.training.state.generators import (
    DrawnGenerators,
    generator_states,
    restore_generators,
)


def draw() -> tuple[float, float, float, float]:
    normal = float(np.random.standard_normal())  # noqa: NPY002 - the generator that is restored
    return random.random(), normal, float(torch.rand(1)), random.gauss(0, 1)  # noqa: S311


def test_every_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    draw()  # leaves half of a pair of normal numbers in NumPy and Python
    write_state(tmp_path / "states", generator_states("cpu"))
    expected = [draw(), draw()]
    assert [draw(), draw()] != expected
    restore_generators(read_state(tmp_path / "states"), "cpu")
    assert [draw(), draw()] == expected


def test_generators_that_a_step_draws_from_are_named() -> None:
    drawn = DrawnGenerators("cpu")
    with drawn.observed():
        torch.rand(1)
    random.random()  # noqa: S311 - between two steps
    with drawn.observed():
        np.random.standard_normal()  # noqa: NPY002

    assert drawn.names == {"numpy", "torch"}
