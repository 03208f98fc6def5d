"""Double precision without casts to float32."""

from typing import Any

import torch
from torch import Tensor

from assay.hooks.function_mode import Arguments, Function, FunctionMode


class ExactDouble(FunctionMode):
    """Turns casts to float32 into casts to float64 while the yardstick runs.

    Hugging Face models compute norms, softmax and rotary tables in float32, even after `.double()`.
    """

    def call(self, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - see base
        """Call `func` without casts to float32."""
        if func is Tensor.float:
            return args[0].double()
        for item in args:
            if item is torch.float32:
                args = tuple(torch.float64 if one is torch.float32 else one for one in args)
                break
        if kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)
