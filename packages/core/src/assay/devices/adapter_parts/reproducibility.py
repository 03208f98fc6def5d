"""Seeds and deterministic kernels."""

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
    """Inside, torch uses deterministic kernels where it has them; settings are restored on exit.

    Operations without one do not raise, because a run is judged by its numbers anyhow. Nor is new
    memory filled, torch's default in this mode, which would cost a write for each tensor.
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
