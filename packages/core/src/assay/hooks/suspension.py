"""Modes of torch that see the functions that a model calls, and their suspension while assay itself computes."""

import functools
import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from assay.devices.base import SuspendedExecution


class _State(threading.local):
    depth = 0
    dtype = ""
    """Of the models that ran last."""


_state = _State()


def is_suspended() -> bool:
    """Return True if the calling thread is inside `suspended()`."""
    return _state.depth > 0


class _Suspension:
    """A context inside of other ones. Hooks enter it twice in a module call, and generators are slow."""

    def __init__(self, *inside: AbstractContextManager[Any]) -> None:
        if torch.is_inference_mode_enabled():
            inside = (torch.inference_mode(mode=False), torch.no_grad(), *inside)
        self._inside = (SuspendedExecution(), *inside)

    def __enter__(self) -> None:
        _state.depth += 1
        for one in self._inside:
            one.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for one in reversed(self._inside):
            one.__exit__(kind, error, traceback)
        _state.depth -= 1


def suspended_modes() -> AbstractContextManager[None]:
    """Compute without precision modes, operation watchers, simulated devices and inference mode.

    Tensors made in inference mode cannot be changed outside of it, as sums are that grow call by call.
    """
    return _Suspension()


def suspended() -> AbstractContextManager[None]:
    """Suspend modes faster, for plain tensors: subclasses such as DTensor do not work inside."""
    return _Suspension(torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch())  # noqa: SLF001


@contextmanager
def resumed() -> Iterator[None]:
    """Let hooks see the calls of another model inside of `suspended`."""
    depth, _state.depth = _state.depth, 0
    try:
        yield
    finally:
        _state.depth = depth


Function = Callable[..., Any]
Arguments = tuple[Any, ...]


class FunctionMode(TorchFunctionMode):
    """Gives every call of a torch function to `call`, unless assay itself computes."""

    def __init__(self, call: Callable[[Function, Arguments, dict[str, Any]], Any]) -> None:
        super().__init__()
        self._call = call

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
        return func(*args, **kwargs) if is_suspended() else self._call(func, args, kwargs)


# Of one state, another dtype draws other numbers.
_DRAWING: tuple[Function, ...] = (torch.rand, torch.randn, torch.rand_like, torch.randn_like)
_DRAWING_IN_PLACE: tuple[Function, ...] = (Tensor.uniform_, Tensor.normal_, Tensor.bernoulli_)


class ExactDouble(FunctionMode):
    """Turns casts to float32 into casts to float64 while the yardstick runs, and makes float64 the default dtype.

    Hugging Face models compute norms, softmax and rotary tables in float32, even after `.double()`. Their
    masks and buffers are made in the default dtype.
    """

    def __init__(self) -> None:
        super().__init__(self._call_without_casts)

    def __enter__(self) -> Self:
        """Begin to turn casts, and make float64 the default dtype."""
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the default dtype."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(self._default)

    @staticmethod
    def _call_without_casts(func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - whatever func returns
        if func is Tensor.float:
            return args[0].double()
        if func in _DRAWING and kwargs.get("dtype") in (None, torch.float32, torch.float64):
            return func(*args, **{**kwargs, "dtype": torch.float32}).double()
        if func in _DRAWING_IN_PLACE and args[0].dtype is torch.float64:
            return args[0].copy_(func(args[0].float(), *args[1:], **kwargs))
        for item in args:
            if item is torch.float32:
                args = tuple(torch.float64 if one is torch.float32 else one for one in args)
                break
        if kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def exact_for(dtype: str) -> AbstractContextManager[object]:
    """Return the context in which a model of `dtype` runs: `ExactDouble` for float64.

    The first for another dtype than before drops what the code of models cached, such as tables of positions:
    the arguments are the same, and the values have another precision.
    """
    if _state.dtype not in ("", dtype):
        for one in gc.get_objects():
            if type(one) is functools._lru_cache_wrapper and _is_of_models(one):  # noqa: SLF001
                one.cache_clear()
    _state.dtype = dtype
    return ExactDouble() if dtype == "float64" else nullcontext()


def _is_of_models(function: Function) -> bool:
    return str(function.__module__).startswith(("transformers.models.", "transformers_modules."))
