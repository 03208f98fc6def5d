"""Repeating forward passes in another dtype, to record the rounding noise of every tensor."""

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from assay.hooks.module_tracer import ActiveCall, ModuleTracer, NullHandler
from assay.hooks.suspension import resumed, suspended_modes
from assay.hooks.values.nested import iterate_leaves, iterate_tensors, map_tensors


class DtypeCopy(NullHandler):
    """A copy of a model in another dtype, which runs before each recorded pass on its arguments.

    The copy has its own key/value caches: errors of earlier tokens propagate as in a run in that dtype.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._source = model
        with suspended_modes():
            self._copy = _copy_in_dtype(model, dtype)
        self._tracer = ModuleTracer(self)
        self._values: dict[tuple[str, int, str], Tensor] = {}
        self._caches: dict[int, tuple[ref[Any], Any]] = {}

    @property
    def name(self) -> str:
        """Name of the dtype, such as `bfloat16`."""
        return str(self._dtype).removeprefix("torch.")

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Let `repeat` keep the values of each pass inside this context."""
        with self._tracer.attached(self._copy):
            yield

    def repeat(self, arguments: dict[str, Any]) -> None:
        """Run the copy on the arguments of a pass, without a change to the script's random numbers."""
        self._values.clear()
        self._follow_source()
        mine = {name: self._convert(name, value) for name, value in arguments.items()}
        rest = mine.pop("args", ())
        device = next(self._copy.parameters(), torch.empty(0)).device
        devices: dict[str, Any] = {"devices": []}
        if device.type != "cpu":
            devices = {"devices": [device], "device_type": device.type}
        with resumed(), torch.no_grad(), torch.random.fork_rng(**devices):
            self._copy(*rest, **mine)

    def enter(self, active: ActiveCall) -> None:
        """Keep the arguments of a call."""
        self._keep(active, "input", active.arguments)

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - see TraceHandler
        """Keep the results of a call."""
        self._keep(active, "output", output)
        return output

    def measure(self, active: ActiveCall, port: str, value: object) -> Iterator[tuple[str, Tensor]]:
        """Yield the error of the copy's tensors against those of the script's pass.

        Returns: port, and (3,) float64: norm of the error, norm of the tensor, number of elements.
        """
        site = active.call.site
        for name, tensor in iterate_tensors(value, port):
            found = self._values.get((site.module, site.call, name))
            if found is None or found.shape != tensor.shape or not tensor.is_floating_point():
                continue
            exact = tensor.detach().float()
            error = torch.linalg.vector_norm(found.float() - exact)
            norm = torch.linalg.vector_norm(exact)
            yield name, torch.stack([error, norm, norm.new_tensor(exact.numel())]).double()

    def _keep(self, active: ActiveCall, port: str, value: object) -> None:
        site = active.call.site
        for name, tensor in iterate_tensors(value, port):
            if tensor.is_floating_point():
                self._values[site.module, site.call, name] = tensor.detach().clone()

    def _follow_source(self) -> None:
        """Copy the parameters and buffers. Their versions do not count changes through `.data`."""
        pairs = [
            *zip(self._copy.parameters(), self._source.parameters(), strict=True),
            *zip(self._copy.buffers(), self._source.buffers(), strict=True),
        ]
        with torch.no_grad():
            for mine, theirs in pairs:
                mine.copy_(theirs)

    def _convert(self, name: str, value: Any) -> Any:  # noqa: ANN401 - any argument
        if all(
            isinstance(leaf, Tensor | bool | int | float | str | torch.dtype | None)
            for _, leaf in iterate_leaves(value, name)
        ):
            return map_tensors(value, name, lambda _, tensor: self._convert_tensor(tensor))
        known = self._caches.get(id(value))
        if known is not None and known[0]() is value and _length(known[1]) == _length(value):
            return known[1]
        copy = self._convert_object(value)
        if _length(value) is not None:
            self._caches = {key: one for key, one in self._caches.items() if one[0]() is not None}
            self._caches[id(value)] = ref(value), copy
        return copy

    def _convert_tensor(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.clone()
        limits = torch.finfo(self._dtype)  # a mask's smallest float32 would round to -inf
        return tensor.detach().clamp(limits.min, limits.max).to(self._dtype, copy=True)

    def _convert_object(self, value: object) -> Any:  # noqa: ANN401 - of the same class
        """Copy an object of any class by pickling, which gives every tensor to `persistent_id`."""
        tensors: list[Tensor] = []
        stream = io.BytesIO()

        class Pickler(pickle.Pickler):
            def persistent_id(self, part: object) -> int | None:
                if not isinstance(part, Tensor):
                    return None
                tensors.append(part)
                return len(tensors) - 1

        class Unpickler(pickle.Unpickler):
            def persistent_load(unpickler, number: int) -> Tensor:  # noqa: N805 - `self` is the outer one
                return self._convert_tensor(tensors[number])

        Pickler(stream).dump(value)
        stream.seek(0)
        return Unpickler(stream).load()


def _copy_in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy a model as `from_pretrained` loads it in `dtype`: non-persistent buffers keep their dtype.

    Rotary frequencies are such buffers. In bfloat16 their error would hide a wrong rotation.
    """
    copy = deepcopy(model).requires_grad_(requires_grad=False)
    kept = [
        (module._buffers, name, module._buffers[name])  # noqa: SLF001 - there is no public list
        for module in copy.modules()
        for name in module._non_persistent_buffers_set  # noqa: SLF001
    ]
    copy.to(dtype)
    for buffers, name, buffer in kept:
        buffers[name] = buffer
    return copy


def _length(value: object) -> int | None:
    """Return the number of tokens that a key/value cache holds; None for other objects."""
    read = getattr(value, "get_seq_length", None)
    return int(read()) if callable(read) else None
