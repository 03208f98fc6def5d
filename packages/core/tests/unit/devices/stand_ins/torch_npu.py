"""Stand-in of torch_npu: two NPUs."""

from types import SimpleNamespace
from typing import Any

import torch
from cuda_like import cuda_like  # type: ignore[import-not-found] # beside it on the path
from situation import act  # type: ignore[import-not-found] # as above

act("torch_npu")

torch_module: Any = torch
torch_module.npu = cuda_like(
    "npu",
    "Ascend910B1",
    "Ascend910B1",
    is_bf16_supported=lambda: True,
    matmul=SimpleNamespace(allow_hf32=False),
)
