"""Stand-in of torch_spyre: torch.spyre is there after _autoload, with few functions."""

from types import ModuleType
from typing import Any

import torch


def _autoload() -> None:
    module: Any = ModuleType("torch.spyre")
    module.is_available = lambda: True
    module.device_count = lambda: 1
    module.synchronize = lambda *_: None
    torch_module: Any = torch
    torch_module.spyre = module
