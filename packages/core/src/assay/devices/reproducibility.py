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

    An operation without one must not stop a run that is judged by its numbers anyhow.
    Fresh memory is not filled, which torch otherwise does here: it would be a write for each tensor.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=enabled, warn_only=warn_only)
        settings.fill_uninitialized_memory = fill
