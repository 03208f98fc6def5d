"""Modules of torch as makers document them: functions of torch.cuda, and no hardware."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

GIBIBYTE = 1 << 30


def cuda_like(kind: str, *products: str, **more: Any) -> Any:
    """A module with as many devices as `products`; its list `asked` has what was called.

    Each function takes what its maker documents and nothing else; `more` adds or replaces some.
    """
    module: Any = ModuleType(f"torch.{kind}")
    module.asked = []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        module.asked.append(f"device {index}")
        yield

    module.is_available = lambda: bool(products)
    module.device_count = lambda: len(products)
    module.get_device_name = lambda index: products[index]
    module.device = device
    module.synchronize = lambda index: module.asked.append(f"synchronize {index}")
    module.reset_peak_memory_stats = lambda index: module.asked.append(f"reset {index}")
    module.max_memory_allocated = lambda index: GIBIBYTE
    module.mem_get_info = lambda index: (2 * GIBIBYTE, 4 * GIBIBYTE)
    # What torch.manual_seed calls of each kind of device.
    module.manual_seed_all = lambda seed: module.asked.append(f"seed {seed}")
    module._is_in_bad_fork = lambda: False
    for name, value in more.items():
        setattr(module, name, value)
    return module


def properties(**values: Any) -> Callable[[int], Any]:
    """A function that tells properties, of every device the same."""
    return lambda index: SimpleNamespace(**values)
