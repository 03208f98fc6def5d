"""Hash the contents of weights, per tensor and combined."""

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
    """Dtype, shape and hash of a tensor in a checkpoint."""

    dtype: str
    """Name in the safetensors format, such as "BF16"."""
    shape: tuple[int, ...]
    hash: str
    """Covers dtype, shape and values."""


def hash_values(dtype: str, shape: tuple[int, ...], values: "Buffer") -> str:
    """Hash a tensor's dtype, shape and values with XXH3-128, which is not cryptographic.

    Source: Collet, xxHash fast digest algorithm (the XXH3 family).
    """
    digest = xxhash.xxh3_128(f"{dtype}{list(shape)}".encode())
    digest.update(values)
    return digest.hexdigest()


def hash_tensor(tensor: "torch.Tensor", dtype: str = "") -> str:
    """Hash a tensor's dtype, shape and values; `dtype`: its name in the hash, by default torch's."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    name = dtype or str(tensor.dtype).removeprefix("torch.")
    return hash_values(name, tuple(tensor.shape), flat.numpy().data)


def combine_hashes(hashes: Mapping[str, str]) -> str:
    """Combine named hashes into one that does not depend on their order."""
    lines = "".join(f"{name} {hashes[name]}\n" for name in sorted(hashes))
    return xxhash.xxh3_128_hexdigest(lines.encode())


def weight_hashes(model: "torch.nn.Module") -> dict[str, str]:
    """Hash each parameter and buffer; list tied tensors under every name."""
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
                known[id(tensor)] = hash_tensor(tensor)
            hashes[name] = known[id(tensor)]
    return hashes
