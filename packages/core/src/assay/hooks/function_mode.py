"""A mode of torch that sees the calls of functions while a model runs."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from torch.overrides import TorchFunctionMode

from assay.hooks.suspension import is_suspended

Function = Callable[..., Any]
Arguments = tuple[Any, ...]


class FunctionMode(TorchFunctionMode):
    """Sees every call of a torch function, unless assay itself computes."""

    @abstractmethod
    def call(self, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - whatever func returns
        """Call `func`, or something in its place."""

    def __torch_function__(
        self,
        func: Function,
        types: Iterable[type],
        args: Arguments = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever func returns
        """Call a function, as torch asks for it."""
        del types
        kwargs = kwargs or {}
        return func(*args, **kwargs) if is_suspended() else self.call(func, args, kwargs)
