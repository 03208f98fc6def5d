"""Stand-in of torch_spyre: torch.spyre is there after _autoload, with few functions."""

from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from situation import act  # type: ignore[import-not-found] # beside it on the path


def _autoload() -> None:
    act("torch_spyre")
    module: Any = ModuleType("torch.spyre")
    module.is_available = lambda: True
    module.device_count = lambda: 1
    module.synchronize = lambda device: None
    module.manual_seed_all = lambda seed: None
    module._is_in_bad_fork = lambda: False
    module.memory = SimpleNamespace(
        reset_peak_memory_stats=lambda: None, max_memory_allocated=lambda: 1 << 20
    )
    torch_module: Any = torch
    torch_module.spyre = module
