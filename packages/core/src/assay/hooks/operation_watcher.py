"""Showing every operation (aten) that runs to what records or judges it."""

from collections.abc import Iterable
from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from assay.hooks.suspension import is_suspended


class OperationWatcher(TorchDispatchMode):
    """Runs every operation as it is, and then shows it to `after_operation`."""

    def after_operation(self, func: OpOverload, result: object) -> None:
        """Called after each operation that is not the watchers' own."""
        raise NotImplementedError

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Called by torch instead of each operation, with its arguments."""
        del types
        result: object = func(*args, **(kwargs or {}))
        if not is_suspended():
            self.after_operation(func, result)
        return result
