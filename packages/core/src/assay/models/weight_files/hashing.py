"""Content hashes of weights: one for each tensor, and one over all of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from assay.progress import counted

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A tensor as it is kept in a checkpoint.

    dtype: as safetensors names it, such as "BF16".
    hash: of dtype, shape and values.
    """

    dtype: str
    shape: tuple[int, ...]
    hash: str


def hash_values(dtype: str, shape: tuple[int, ...], values: "Buffer") -> str:
    """XXH3-128 of a tensor's values, together with its dtype and shape.

    Source: Collet, xxHash fast digest algorithm (the XXH3 family); not cryptographic.
    """
    digest = xxhash.xxh3_128(f"{dtype}{list(shape)}".encode())
    digest.update(values)
    return digest.hexdigest()


def combine_hashes(hashes: Mapping[str, str]) -> str:
    """One hash over named hashes; their order does not matter."""
    lines = "".join(f"{name} {hashes[name]}\n" for name in sorted(hashes))
    return xxhash.xxh3_128_hexdigest(lines.encode())


def weight_hashes(model: "torch.nn.Module") -> dict[str, str]:
    """The hash of each parameter and buffer by its name; tied ones are listed under every name."""
    import torch

    hashes: dict[str, str] = {}
    known: dict[int, str] = {}
    with torch.no_grad():
        tensors = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        for name, tensor in counted("hashes weights", tensors, "tensors"):
            if id(tensor) not in known:
                flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                dtype = str(tensor.dtype).removeprefix("torch.")
                known[id(tensor)] = hash_values(dtype, tuple(tensor.shape), flat.numpy().data)
            hashes[name] = known[id(tensor)]
    return hashes
