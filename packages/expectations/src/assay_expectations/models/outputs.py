"""Comparison of a model's outputs as a tuple and by name."""

import torch
from torch import Tensor

from assay.devices.registry import open_run
from assay.devices.run_string import parse_run
from assay.models import load_model

_NUM_TOKENS = 8


def tuple_differences(model: str, run: str) -> list[str]:
    """List the bitwise differences between outputs with `return_dict=False` and outputs by name.

    Hidden states are included, so that there are several tensors.
    Raises: UsageError if the model cannot be loaded.
    """
    opened = parse_run(run)
    device = open_run(opened)
    loaded = load_model(model, dtype=opened.dtype, device=device.torch_device)
    ids = torch.arange(_NUM_TOKENS, device=device.torch_device)[None]
    with torch.no_grad(), device.execution(), device.deterministic():
        by_name = loaded.model(input_ids=ids, output_hidden_states=True)
        as_tuple = loaded.model(input_ids=ids, output_hidden_states=True, return_dict=False)
    if not isinstance(as_tuple, tuple):
        return [f"return_dict=False returns a {type(as_tuple).__name__}"]
    expected, actual = _tensors(by_name.to_tuple()), _tensors(as_tuple)
    if len(expected) != len(actual):
        return [f"{len(actual)} tensors in the tuple, {len(expected)} by name"]
    return [
        f"tensor {number} of the tuple, {list(one.shape)}, differs from the one by name"
        for number, (one, other) in enumerate(zip(actual, expected, strict=True))
        if not torch.equal(one, other)
    ]


def _tensors(value: object) -> list[Tensor]:
    """Return all tensors of a nested tuple, in order, without caches."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in _tensors(part)]
    return []
