"""Stand-in of habana_frameworks.torch: eight second-generation accelerators."""

from typing import Any

import torch
from cuda_like import cuda_like  # type: ignore[import-not-found] # beside it on the path

torch_module: Any = torch
torch_module.hpu = cuda_like("hpu", *["GAUDI2"] * 8)
