"""What follows from the size of a model: how many threads it is worth, and which yardstick."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

# Below this a second thread costs more than it gives: every operation is a few microseconds.
_SMALL_MODEL_PARAMETERS = 20_000_000

# Up to this size the yardstick is computed in float64, twice the memory of float32; above it costs
# more than it tells. A choice; the verdict names the dtype.
FLOAT64_PARAMETERS = 2_000_000_000


def yardstick_dtype(num_parameters: int, supported: Collection[str]) -> str:
    """The dtype of the yardstick on a device with the dtypes `supported`."""
    small = num_parameters <= FLOAT64_PARAMETERS
    return "float64" if small and "float64" in supported else "float32"


def choose_threads(num_parameters: int) -> None:
    """One thread for small models, torch's own choice for others."""
    if num_parameters < _SMALL_MODEL_PARAMETERS:
        torch.set_num_threads(1)


@contextmanager
def chosen_threads(num_parameters: int) -> Iterator[None]:
    """`choose_threads` for a while: the process is not ours alone."""
    before = torch.get_num_threads()
    choose_threads(num_parameters)
    try:
        yield
    finally:
        torch.set_num_threads(before)
