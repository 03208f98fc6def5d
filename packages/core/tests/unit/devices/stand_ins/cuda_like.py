"""Modules of torch as makers document them: with functions of torch.cuda, and without hardware.

They are no part of the tests' own packages: processes that tests start find them on their path.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

GIBIBYTE = 1 << 30


def cuda_like(kind: str, *products: str, **more: Any) -> Any:
    """A module with as many devices as `products`; its list `asked` has what was called."""
    module: Any = ModuleType(f"torch.{kind}")
    module.asked = []

    def noting(name: str, answer: Any = None) -> Callable[..., Any]:
        def called(*_: Any) -> Any:
            module.asked.append(name)
            return answer

        return called

    @contextmanager
    def device(index: int) -> Iterator[None]:
        module.asked.append(f"device {index}")
        yield

    module.is_available = lambda: bool(products)
    module.device_count = lambda: len(products)
    module.get_device_name = lambda index: products[index]
    module.device = device
    module.synchronize = noting("synchronize")
    module.reset_peak_memory_stats = noting("reset")
    module.max_memory_allocated = noting("peak", GIBIBYTE)
    module.mem_get_info = noting("free", (2 * GIBIBYTE, 4 * GIBIBYTE))
    # What torch.manual_seed calls of each kind of device.
    module.manual_seed_all = noting("seed")
    module._is_in_bad_fork = lambda: False
    for name, value in more.items():
        setattr(module, name, value)
    return module


def properties(**values: Any) -> Callable[..., Any]:
    """A function that tells properties, of every device the same."""
    return lambda *_: SimpleNamespace(**values)
