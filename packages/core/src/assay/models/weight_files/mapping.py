"""Single tensors of safetensors files, mapped into memory."""

from collections.abc import Mapping

import numpy as np
import torch

from assay.files import UnreadableFileError, open_file
from assay.models.weight_files.pickled import SAFETENSORS_NAMES
from assay.models.weight_files.reading import StoredTensor

_DTYPES: Mapping[str, torch.dtype] = {
    **{name: dtype for dtype, name in SAFETENSORS_NAMES.items()},
    "C64": torch.complex64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def dtype_of(stored: StoredTensor) -> str:
    """Return torch's name of the dtype, such as `bfloat16`; "" if torch has none."""
    return str(_DTYPES.get(stored.dtype, "")).removeprefix("torch.")


def map_tensor(stored: StoredTensor) -> torch.Tensor:
    """Return a tensor whose values are read on access. No other part of the file is mapped.

    Changes to it are not written to the file.
    Raises: UnreadableFileError, naming file and tensor.
    """
    dtype, num_bytes = _DTYPES.get(stored.dtype), stored.size_bytes
    if dtype is None or num_bytes != stored.num_elements * dtype.itemsize:
        problem = f"{stored.name} has {num_bytes:,} bytes of dtype {stored.dtype}"
        raise UnreadableFileError.of(stored.file, f"{problem}, which assay cannot read")
    if not num_bytes:
        return torch.empty(stored.shape, dtype=dtype)
    try:
        with open_file(stored.file) as file:
            data = np.memmap(file, np.uint8, "c", stored.start, (num_bytes,))
    except ValueError as error:
        raise UnreadableFileError.of(stored.file, f"{stored.name}: {error}") from None
    values = torch.from_numpy(data)
    if stored.start % dtype.itemsize:
        values = values.clone()  # torch expects aligned memory
    return values.view(dtype).reshape(stored.shape)
