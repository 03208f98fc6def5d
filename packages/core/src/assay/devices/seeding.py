"""Making a script repeat its numbers."""

import os
import sys

import torch

from assay.devices.adapter_parts.reproducibility import seed_generators

# Sizes of workspace with which cuBLAS repeats its sums. Source: its documentation, section 2.1.4.
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"

_OTHERS = ("tensorflow", "jax", "cupy")


def seed_all(seed: int) -> list[str]:
    """Seed every random generator, and let torch use deterministic kernels where it has them.

    Returns: what it could not control, in sentences.

    >>> assay.seed_all(0)  # doctest: +SKIP
    ['set PYTHONHASHSEED=0 before Python starts: the order of sets of texts differs from run to run']
    """
    seed_generators(seed)
    torch.set_deterministic_debug_mode("warn")
    torch.backends.cudnn.benchmark = False
    return _find_uncontrolled()


def _find_uncontrolled() -> list[str]:
    found = []
    if os.environ.get("PYTHONHASHSEED", "random") == "random":
        found.append(
            "set PYTHONHASHSEED=0 before Python starts: the order of sets of texts differs from run to run"
        )
    if torch.cuda.is_available() and _CUBLAS not in os.environ:
        if torch.cuda.is_initialized():
            found.append(f"set {_CUBLAS}=:4096:8 before Python starts: cuBLAS is in use already")
        else:
            os.environ[_CUBLAS] = ":4096:8"
    found += [f"{name} has generators of its own" for name in _OTHERS if name in sys.modules]
    if torch.get_num_threads() > 1:
        found.append(
            f"torch uses {torch.get_num_threads()} threads: with another number, sums differ in their last bits"
        )
    return found
