"""States of the random number generators that a training step may draw from."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from assay.training.state.files import fingerprint


def generator_states(torch_device: str) -> dict[str, Any]:
    """Return the states of all generators, as tensors and JSON values.

    Returns: `python`, `numpy` and `torch` (the host's), and `device` unless that is the host.
    """
    numpy_state: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - what model code draws from
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy_state
        | {
            "state": {
                "key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
                "pos": numpy_state["state"]["pos"],
            }
        },
        "torch": torch.get_rng_state(),
    }
    device = torch.device(torch_device)
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return states


def restore_generators(states: Mapping[str, Any], torch_device: str) -> None:
    """Restore the states that `generator_states` returned, perhaps on the host.

    The generator of an accelerator stays as it is if `states` has no `device`.
    """
    random.setstate(states["python"])
    numpy_state = states["numpy"]
    key = numpy_state["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state(  # noqa: NPY002 - as above
        dict(numpy_state) | {"state": {"key": key, "pos": numpy_state["state"]["pos"]}}
    )
    torch.set_rng_state(states["torch"])
    device = torch.device(torch_device)
    if device.type != "cpu" and "device" in states:
        torch.get_device_module(device).set_rng_state(states["device"], device)


class DrawnGenerators:
    """Finds the generators that the steps of a run draw from.

    Make each step inside of `observed`, and read `names` at the end.
    """

    def __init__(self, torch_device: str) -> None:
        self._torch_device = torch_device
        self.names: frozenset[str] = frozenset()
        """Generators whose state a step has changed: `python`, `numpy`, `torch`, `device`."""

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Observe one step inside this context."""
        before = self.hashes()
        yield
        after = self.hashes()
        self.names |= {name for name, value in before.items() if after[name] != value}

    def states(self) -> dict[str, Any]:
        """Return the current state of each generator."""
        return generator_states(self._torch_device)

    def restore(self, states: Mapping[str, Any]) -> None:
        """Restore what `states` returned."""
        restore_generators(states, self._torch_device)

    def hashes(self) -> dict[str, str]:
        """Return a hash of the current state of each generator."""
        states = self.states()
        return {name: repr(fingerprint({name: state})) for name, state in states.items()}
