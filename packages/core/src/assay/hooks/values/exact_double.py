"""Double precision without casts to float32."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from assay.hooks.suspension import is_suspended


class ExactDouble(TorchFunctionMode):
    """Turns casts to float32 into casts to float64 while the yardstick runs.

    Hugging Face models compute norms, softmax and rotary tables in float32, even after `.double()`.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever func returns
        del types
        kwargs = kwargs or {}
        if is_suspended():
            return func(*args, **kwargs)
        if func is Tensor.float:
            return args[0].double()
        if any(item is torch.float32 for item in args):
            args = tuple(torch.float64 if item is torch.float32 else item for item in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)
