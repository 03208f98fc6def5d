"""The state of every generator that a training step may draw from."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from assay.training.state.files import fingerprint


def generator_states(torch_device: str) -> dict[str, Any]:
    """The states of all generators, made of tensors and of what JSON knows.

    Returns: `python`, `numpy` and `torch` (the host's); on another `torch_device` than the host
        also `device`.
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
    """Set every generator as it was when `generator_states` was called."""
    random.setstate(states["python"])
    numpy_state = states["numpy"]
    key = numpy_state["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state(  # noqa: NPY002 - as above
        dict(numpy_state) | {"state": {"key": key, "pos": numpy_state["state"]["pos"]}}
    )
    torch.set_rng_state(states["torch"])
    device = torch.device(torch_device)
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states["device"], device)


class DrawnGenerators:
    """Finds out from which generators the steps of a trainer draw.

    One is made for each run. Steps are made inside of `observed`; `names` is read at the end.

    names: `python`, `numpy`, `torch`, `device`: those whose state a step has changed.
    """

    def __init__(self, torch_device: str) -> None:
        self._torch_device = torch_device
        self.names: frozenset[str] = frozenset()

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Inside is one step."""
        before = self.hashes()
        yield
        after = self.hashes()
        self.names |= {name for name, value in before.items() if after[name] != value}

    def states(self) -> dict[str, Any]:
        """The present state of each."""
        return generator_states(self._torch_device)

    def restore(self, states: Mapping[str, Any]) -> None:
        """Set each as it was when `states` was called."""
        restore_generators(states, self._torch_device)

    def hashes(self) -> dict[str, str]:
        """For each generator by its name a hash of its present state."""
        states = self.states()
        return {name: repr(fingerprint({name: state})) for name, state in states.items()}
