"""Stand-in of habana_frameworks.torch: eight second-generation accelerators."""

from typing import Any

import torch
from cuda_like import cuda_like  # type: ignore[import-not-found] # beside it on the path
from situation import act  # type: ignore[import-not-found] # as above

act("habana_frameworks")

torch_module: Any = torch
torch_module.hpu = cuda_like(
    "hpu",
    *["GAUDI2"] * 8,
    synchronize=lambda: torch_module.hpu.asked.append("synchronize"),
)
