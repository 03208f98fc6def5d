"""Choose the number of threads and the dtype of the yardstick by the size of a model."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

# Below this size a second thread costs more time than it saves: operations take microseconds.
_SMALL_MODEL_PARAMETERS = 20_000_000

# Up to this size the yardstick is computed in float64, which takes twice the memory of float32.
# The limit is a choice; the verdict names the dtype.
FLOAT64_PARAMETERS = 2_000_000_000


def yardstick_dtype(num_parameters: int, supported: Collection[str]) -> str:
    """Return the dtype of the yardstick; `supported`: dtypes of the device."""
    small = num_parameters <= FLOAT64_PARAMETERS
    return "float64" if small and "float64" in supported else "float32"


def choose_threads(num_parameters: int) -> None:
    """Make torch use one thread for small models, and its default for others."""
    if num_parameters < _SMALL_MODEL_PARAMETERS:
        torch.set_num_threads(1)


@contextmanager
def chosen_threads(num_parameters: int) -> Iterator[None]:
    """Apply `choose_threads` inside the context, and restore the number on exit."""
    with limited_threads(torch.get_num_threads()):
        choose_threads(num_parameters)
        yield


@contextmanager
def limited_threads(num_threads: int) -> Iterator[None]:
    """Let torch use this many threads inside the context, and restore the number on exit."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
