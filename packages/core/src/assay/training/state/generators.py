"""The state of every generator that a training step may draw from."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def generator_states(torch_device: str) -> dict[str, Any]:
    """States of Python's, NumPy's and torch's generators, with that of `torch_device`."""
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
