"""Arrays that other tools wrote with `numpy.save`."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from assay.files import UnreadableFileError, open_file


def map_array(file: Path) -> Tensor:
    """Map a .npy file into memory. Changes to the tensor are not written to the file.

    Raises: UnreadableFileError, naming the file, for any other content, and for arrays of objects.
    """
    try:
        with open_file(file):  # refuses a FIFO, on which numpy would block
            # Copy on write: torch warns about arrays that cannot be written to.
            array = np.load(file, mmap_mode="c", allow_pickle=False)
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
    except UnreadableFileError:
        raise
    except Exception as error:  # noqa: BLE001 - any: numpy parses the header as Python code
        raise UnreadableFileError.of(file, f"no array of numbers: {error}") from None
