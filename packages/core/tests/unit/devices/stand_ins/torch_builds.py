"""What torch itself has on machines of makers that need no package beside it, and a driver's files."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from cuda_like import (  # type: ignore[import-not-found] # beside it on the path
    GIBIBYTE,
    cuda_like,
    properties,
)
from situation import act  # type: ignore[import-not-found] # as above

HERE = Path(__file__).parent


def install(setattr_: Callable[[Any, str, Any], None]) -> None:
    """Give this process's torch the modules xpu and mps, and the cores of a trn1 instance."""
    from assay.devices import trainium

    gpu = cuda_like(
        "xpu",
        "Intel(R) Arc(TM) B580",
        is_available=lambda: act("xpu") or True,
        get_device_properties=properties(has_fp64=False, driver_version="25.18"),
        get_device_capability=lambda index: {"architecture": 0x5004004},
        is_bf16_supported=lambda *, including_emulation: not including_emulation,
        is_tf32_supported=lambda: True,
    )
    metal = SimpleNamespace(
        device_count=lambda: 1,
        synchronize=lambda: None,
        recommended_max_memory=lambda: 8 * GIBIBYTE,
        driver_allocated_memory=lambda: GIBIBYTE,
        manual_seed=lambda seed: None,
        _is_in_bad_fork=lambda: False,
    )
    setattr_(torch, "xpu", gpu)
    setattr_(torch, "mps", metal)
    setattr_(torch.backends.mps, "is_available", lambda: act("mps") or True)
    setattr_(torch.backends.mps, "get_name", lambda: "Apple M3 Max")
    setattr_(trainium, "_DRIVER", HERE / "trn1" / "neuron0")
    setattr_(trainium, "_INSTANCE", HERE / "trn1" / "product_name")
