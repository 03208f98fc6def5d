"""Load a model again, with another seed and with NaN in uninitialized memory.

Stored tensors were compared with the files already, so the second load uses placeholders for them. The
tensors that the model's code computes must be bitwise equal to those of the first load.
"""

# ruff: noqa: ANN401 - objects of transformers

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from assay.models.loaded.differences import measure_difference
from assay.models.loaded.report import LoadReport
from assay.models.loaded.weights import all_tensors

_OTHER_SEED = 0x5EED


def load_again(model: Any, config: Any, stored: list[str], dtype: torch.dtype) -> nn.Module:
    """Load another model of the same class, with placeholders for the tensors `stored`.

    config: a new configuration from the same config.json.
    Raises: any exception of the loader.
    """
    held = model.state_dict()

    def load(placeholder: Callable[[Tensor], Tensor]) -> nn.Module:
        state = {name: placeholder(held[name]) for name in stored if name in held}
        again: nn.Module = type(model).from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=dtype,
            attn_implementation=getattr(model.config, "_attn_implementation", None),
        )
        return again.eval()

    with other_random_numbers(), _dirty_memory():
        try:
            return load(lambda tensor: torch.zeros((), dtype=tensor.dtype).expand(tensor.shape))
        except RuntimeError:
            # Code that writes into loaded tensors needs real memory.
            return load(lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype))


def compare_made(
    made: dict[str, Tensor], again: nn.Module, dtype: torch.dtype, report: LoadReport
) -> None:
    """Compare the tensors that the first load computed with the second load's; add to `report`."""
    second = {name: tensor.detach().cpu() for name, tensor in all_tensors(again)}
    for name, tensor in made.items():
        other = second.get(name)
        if other is None or other.shape != tensor.shape:
            report.not_compared.append(f"{name} (a second load has no such tensor)")
            continue
        report.compared += 1
        found = measure_difference(name, tensor, other.to(tensor.dtype), dtype, "varies")
        report.weights += [found] if found is not None else []


@contextmanager
def other_random_numbers() -> Iterator[None]:
    """Seed every generator of the host differently inside this context, and restore them on exit."""
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global one
    with torch.random.fork_rng(devices=[]):
        random.seed(_OTHER_SEED)
        np.random.seed(_OTHER_SEED)  # noqa: NPY002 - model code draws from it
        torch.manual_seed(_OTHER_SEED)
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)  # noqa: NPY002 - as above


@contextmanager
def _dirty_memory() -> Iterator[None]:
    """Make torch fill uninitialized memory with NaN or the largest integer inside this context."""
    was_on = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned)
        settings.fill_uninitialized_memory = filled
