"""Seeds and deterministic kernels: what adapters over torch share."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_NUMPY_SEEDS = 2**32


def seed_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, those of torch on every device."""
    random.seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)  # noqa: NPY002 - the generator that model code draws from
    torch.manual_seed(seed)


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Inside, torch takes deterministic kernels where it has them, and the rest as they are.

    An operation without one must not stop a run that is judged by its numbers anyhow. Fresh
    memory is not filled, which torch otherwise does here: it would be a write for each tensor.
    """
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    # The same setting as torch.use_deterministic_algorithms, which takes a second to import.
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        settings.fill_uninitialized_memory = fill
