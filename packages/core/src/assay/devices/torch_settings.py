"""Seeds, deterministic kernels, versions, and the precision that torch's settings allow."""

import os
import platform
import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

_NUMPY_SEEDS = 2**32
_OTHER_LIBRARIES = ("tensorflow", "jax", "cupy")

# cuBLAS adds up in one order only with a workspace of fixed size. It reads the variable when a process
# first uses it. Source: cuBLAS documentation, 2.1.4 "Results reproducibility".
CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

_FORMATS = {"tf32": "tf32", "bf16": "bfloat16"}
_OLDER_SETTINGS = {"highest": "ieee", "high": "tf32", "medium": "bf16"}


def seed_all(seed: int) -> list[str]:
    """Seed every random generator, and make torch use deterministic kernels where it has them.

    Returns: sentences about what could not be controlled.

    >>> assay.seed_all(0)  # doctest: +SKIP
    ['set PYTHONHASHSEED=0 before Python starts: the order of sets of texts differs from run to run']
    """
    seed_generators(seed)
    torch.set_deterministic_debug_mode("warn")
    torch.backends.cudnn.benchmark = False
    variable, workspace = CUBLAS_WORKSPACE
    found = []
    if os.environ.get("PYTHONHASHSEED", "random") == "random":
        found.append(
            "set PYTHONHASHSEED=0 before Python starts: the order of sets of texts differs from run to run"
        )
    if torch.cuda.is_available() and variable not in os.environ:
        if torch.cuda.is_initialized():
            found.append(
                f"set {variable}={workspace} before Python starts: cuBLAS is in use already"
            )
        else:
            os.environ[variable] = workspace
    found += [f"{name} has separate generators" for name in _OTHER_LIBRARIES if name in sys.modules]
    if torch.get_num_threads() > 1:
        found.append(
            f"torch uses {torch.get_num_threads()} threads: with another number, sums differ in their last bits"
        )
    return found


def seed_generators(seed: int) -> None:
    """Seed the generators of Python and NumPy, and those of torch on every device."""
    random.seed(seed)
    np.random.seed(seed % _NUMPY_SEEDS)  # noqa: NPY002 - model code draws from this generator
    torch.manual_seed(seed)


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Use deterministic kernels inside this context where torch has them.

    Operations without one only warn. New memory stays uninitialized: torch's default in this mode
    would write every tensor once more.
    """
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    # The same setting as torch.use_deterministic_algorithms, whose import takes a second.
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        settings.fill_uninitialized_memory = fill


class TorchSettings:
    """Methods of the device protocol that are alike for all devices of torch."""

    def seed(self, seed: int) -> None:
        """Seed the generators of Python, NumPy and torch, on all devices."""
        seed_generators(seed)

    def deterministic(self) -> AbstractContextManager[None]:
        """Use deterministic kernels inside the context where torch has them."""
        return deterministic_algorithms()

    def versions(self) -> dict[str, str]:
        """Return the versions of torch and Python."""
        return {"torch": torch.__version__, "python": platform.python_version()}


def float32_operand_format(matmul_settings: object) -> str:
    """Return the format that settings such as `torch.backends.cuda.matmul` allow for float32 operands.

    The caller checks that the hardware has the format. torch 2.9 added one setting per backend, which
    also reflects the older global one; reading the older one after setting a newer one raises there.
    """
    setting = getattr(matmul_settings, "fp32_precision", None)
    if setting is None:
        setting = _OLDER_SETTINGS[torch.get_float32_matmul_precision()]
    return _FORMATS.get(setting, "float32")
