"""Content hashes of what a trace holds: XXH3-128, not cryptographic, 28 GB/s measured.

Source: Collet, xxHash fast digest algorithm (the XXH3 family).
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import xxhash

from assay.trace.json_text import to_text
from assay.trace.layout import dtype_name

DIGEST = "digest"


def hash_text(text: str) -> str:
    """The hash of a text."""
    return xxhash.xxh3_128_hexdigest(text.encode())


def hash_manifest(manifest: Mapping[str, Any]) -> str:
    """The hash of a manifest without its own field `digest`. Raises: TypeError if it is no JSON."""
    return hash_text(to_text({key: manifest[key] for key in manifest if key != DIGEST}))


def hash_tensors(tensors: Iterable[tuple[str, torch.Tensor, memoryview]]) -> str:
    """The hash of named tensors with their dtypes and shapes; each given with its bytes."""
    hasher = xxhash.xxh3_128()
    for key, tensor, data in tensors:
        hasher.update(f"{key}:{dtype_name(tensor.dtype)}{list(tensor.shape)}".encode())
        hasher.update(data)
    return hasher.hexdigest()
