"""Content hashes of a trace: XXH3-128, not cryptographic, 28 GB/s measured.

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
    """Hash a text."""
    return xxhash.xxh3_128_hexdigest(text.encode())


def hash_manifest(manifest: Mapping[str, Any]) -> str:
    """Hash a manifest without its field `digest`. Raises: TypeError if it is not JSON."""
    return hash_text(to_text({key: manifest[key] for key in manifest if key != DIGEST}))


def hash_tensors(tensors: Iterable[tuple[str, torch.Tensor, memoryview]]) -> str:
    """Hash named tensors with their dtypes and shapes. tensors: name, tensor and its bytes."""
    hasher = xxhash.xxh3_128()
    for key, tensor, data in tensors:
        hasher.update(f"{key}:{dtype_name(tensor.dtype)}{list(tensor.shape)}".encode())
        hasher.update(data)
    return hasher.hexdigest()
