"""The operations that made one value, as a program that torch runs without the model.

A replay puts recorded values in the place of computed ones. So the operations that a value depends on end
at parameters and at recorded values, which are the program's inputs: a program holds one stage, in forward
or backward, wherever the stage's code is. Operations on one memory belong together: an operation that
writes to memory which the value is read from is part of the program.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from assay.hooks.suspension import is_suspended, suspended
from assay.hooks.tensors import copy_of
from assay.sites import Site

# Keys of arguments that JSON lacks, and of those that a program cannot hold.
VALUE, DTYPE, DEVICE, TORCH, NUMBER = "value", "dtype", "device", "torch", "number"
GROUP, UNKNOWN = "group", "unknown"

_KEYS = {
    torch.dtype: DTYPE,
    torch.device: DEVICE,
    torch.layout: TORCH,
    torch.memory_format: TORCH,
}

# Operations that replace the content of their first argument.
_OVERWRITES = frozenset({"aten.copy_.default", "aten.zero_.default", "aten.fill_.Scalar"})

# Beginnings of the names of operations on lists of tensors.
_OF_LISTS = ("_foreach_", "_fused_")


class Step(NamedTuple):
    """One operation of a program."""

    operation: str
    """Such as "aten.mul.Tensor"."""
    args: list[Any]
    """JSON values; a tensor is {"value": its number}."""
    kwargs: dict[str, Any]
    results: list[int | None]
    """Numbers of the new tensors; None for other results."""
    has_several: bool
    """True if the operation returns a tuple or list."""


@dataclass(frozen=True, slots=True)
class Program:
    """The operations that made the value number `target`."""

    steps: Sequence[Step]
    inputs: Mapping[int, Tensor]
    """Tensors by their numbers."""
    names: Mapping[int, str]
    """Names of the inputs: of a parameter, or of a place in the model; not of every input."""
    target: int


class ProgramPair(NamedTuple):
    """The programs of both sides that made one value, and the right value."""

    site: Site
    candidate: Program
    reference: Program | None
    """None if the reference does not make this value."""
    answer: Mapping[str, Tensor]
    """"answer", and the rows of it that are compared: "kept", bool of its shape without the last dim."""
    error: float = 0.0
    """The candidate's, relative to the answer."""
    rank: int = 0
    ranks: Sequence[Program] = ()
    """The programs of all ranks that made this value; empty if some ranks do not make it."""


@dataclass(slots=True)
class _Recorded:
    step: Step
    reads: frozenset[int]
    """Numbers of its arguments."""
    writes: frozenset[int]
    """The memory that it changes."""
    replaces: frozenset[int]
    """The number of a tensor whose whole memory it overwrites without reading it."""


@dataclass
class ProgramRecorder(TorchDispatchMode):
    """Records every operation that runs inside it, unless assay itself computes."""

    model: nn.Module
    is_recording: Callable[[], bool] = lambda: True
    _operations: list[_Recorded] = field(default_factory=list)
    _known: Any = field(default_factory=WeakIdKeyDictionary)  # Tensor -> number
    _inputs: dict[int, Tensor] = field(default_factory=dict)
    _unsaved: set[int] = field(default_factory=set)
    """Inputs whose memory no operation has changed."""
    _names: dict[int, str] = field(default_factory=dict)
    _names_of: Any = field(default_factory=WeakIdKeyDictionary)  # Tensor -> str
    _numbers_read: dict[float, Tensor] = field(default_factory=dict)
    """Tensors of one element, by the Python number that was read from them."""
    _stale: set[int] = field(default_factory=set)
    """Memory that assay itself has written to: tensors there are inputs from then on."""
    _memory: dict[int, int] = field(default_factory=dict)
    """The number of the first tensor there, by number of a tensor."""
    _count: int = 0

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        for name, tensor in tensors:
            self._names_of[tensor] = name

    def name(self, tensor: Tensor, name: str) -> None:
        """Name a tensor that assay injects."""
        self._names_of[tensor] = name

    def alias(self, new: Tensor, known: Tensor) -> None:
        """Name a tensor like another one."""
        if (name := self._names_of.get(known)) is not None:
            self._names_of[new] = name

    def forget(self) -> None:
        """Begin again: what was made before is an input from now on."""
        self._operations.clear()
        self._known.clear()
        self._inputs.clear()
        self._unsaved.clear()
        self._numbers_read.clear()

    def replacing(self, tensor: Tensor) -> None:
        """Expect that assay writes to a tensor: its content is an input of later operations."""
        known = self._known.get(tensor)
        if known is not None:
            self._save(self._memory[known])
            self._stale.add(self._memory[known])

    def program_of(self, tensor: Tensor) -> Program:
        """Return the program of the operations so far that made a tensor; without steps for an input."""
        known, last = self._find(tensor)
        numbers, memory = {known}, {self._memory[known]}
        needed: list[Step] = [*last]
        for one in reversed(self._operations):
            if numbers.isdisjoint(one.step.results) and memory.isdisjoint(one.writes):
                continue
            step, reads = self._narrowed(one, memory)
            needed.append(step)
            numbers |= reads
            memory -= {self._memory[number] for number in one.replaces}
            memory |= {self._memory[number] for number in reads - one.replaces}
            memory |= {self._memory[number] for number in step.results if number in numbers}
        inputs = {number: self._inputs[number] for number in sorted(numbers & self._inputs.keys())}
        inputs = {number: copy_of(one.detach()).cpu() for number, one in inputs.items()}
        names = {number: self._names[number] for number in inputs if number in self._names}
        target = last[0].results[0] if last else known
        return Program(needed[::-1], inputs, names, target or known)

    def _narrowed(self, one: _Recorded, memory: set[int]) -> tuple[Step, frozenset[int]]:
        """Return an operation on lists of tensors in place for those in `memory` alone, and what it reads."""
        is_of_lists = one.step.operation.split(".")[1].startswith(_OF_LISTS)
        first = one.step.args[0] if is_of_lists and one.step.args else None
        if not isinstance(first, list) or any(one.step.results):
            return one.step, one.reads
        kept = [k for k, item in enumerate(first) if self._memory[item[VALUE]] in memory]

        def narrowed(value: Any) -> Any:  # noqa: ANN401 - JSON
            is_list = isinstance(value, list) and len(value) == len(first)
            return [value[k] for k in kept] if is_list else value

        args = [narrowed(value) for value in one.step.args]
        kwargs = {name: narrowed(value) for name, value in one.step.kwargs.items()}
        return one.step._replace(args=args, kwargs=kwargs), frozenset(numbers_in((args, kwargs)))

    def _find(self, tensor: Tensor) -> tuple[int, list[Step]]:
        """Return the number of a tensor, or of one in the same memory and the step that views it as `tensor`."""
        if self._known.get(tensor) is not None or type(tensor) not in (Tensor, nn.Parameter):
            return self._know(tensor), []
        if (
            tensor.numel() == 1
            and (read := self._numbers_read.get(float(tensor.detach()))) is not None
        ):
            args: list[Any] = [{VALUE: self._know(read)}, [*tensor.shape]]
            return self._know(read), [self._view("aten.view.default", args)]
        for one, known in list(self._known.items()):
            if self._memory[known] in self._stale or not _share_memory(one, tensor):
                continue
            if one.data_ptr() == tensor.data_ptr() and one.numel() == tensor.numel():
                if one.shape == tensor.shape:
                    return known, []
                view = "aten.view.default"
                args = [{VALUE: known}, [*tensor.shape]]
            elif one.is_contiguous() and not one.storage_offset():
                sizes: list[Any] = [[*tensor.shape], [*tensor.stride()], tensor.storage_offset()]
                args, view = [{VALUE: known}, *sizes], "aten.as_strided.default"
            else:
                continue
            return known, [self._view(view, args)]
        return self._know(tensor), []

    def _view(self, operation: str, args: list[Any]) -> Step:
        return Step(operation, args, {}, [self._new()], has_several=False)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Run an operation and record it."""
        del types
        kwargs = kwargs or {}
        if not self.is_recording() or is_suspended():
            return func(*args, **kwargs)
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if any(isinstance(one, FakeTensor) for one in given):
            return func(*args, **kwargs)  # shapes alone, which DTensor asks for
        if any(type(one) not in (Tensor, nn.Parameter) for one in given):
            return NotImplemented  # a subclass computes with the tensors that it holds
        known = [self._know(one) for one in given]
        writes = frozenset(self._memory[self._know(one)] for one in _written(func, args, kwargs))
        for memory in writes:
            self._save(memory)
        replaces = known[:1] if str(func) in _OVERWRITES and _is_whole(given[0]) else []
        step_args, step_kwargs = self._encode(list(args)), self._encode(kwargs)
        result: Any = func(*args, **kwargs)
        if isinstance(result, float):
            self._numbers_read[result] = given[0]
        several = isinstance(result, tuple | list)
        results = [self._add(one, given) for one in (result if several else (result,))]
        step = Step(str(func), step_args, step_kwargs, results, several)
        recorded = _Recorded(step, frozenset(known), writes, frozenset(replaces))
        self._operations.append(recorded)
        return result

    def _know(self, tensor: Tensor) -> int:
        """Return the number of an argument; a tensor that no operation made is an input."""
        known: int | None = self._known.get(tensor)
        if known is not None and self._memory[known] not in self._stale:
            return known
        known = self._known[tensor] = self._new()
        self._inputs[known] = tensor
        self._unsaved.add(known)
        if (name := self._names_of.get(tensor)) is not None:
            self._names[known] = name
        return known

    def _new(self, memory: int = 0) -> int:
        self._count += 1
        self._memory[self._count] = memory or self._count
        return self._count

    def _add(self, result: object, given: Sequence[Tensor]) -> int | None:
        """Give a result a number, unless it is an argument, as of operations in place."""
        if not isinstance(result, Tensor) or self._known.get(result) is not None:
            return None
        shared = [self._memory[self._know(one)] for one in given if _share_memory(one, result)]
        known = self._known[result] = self._new(*shared[:1])
        return known

    def _save(self, memory: int) -> None:
        """Copy the input in `memory`, which is about to change."""
        if memory in self._unsaved:
            self._unsaved.remove(memory)
            with suspended():
                self._inputs[memory] = copy_of(self._inputs[memory].detach())

    def _encode(self, value: Any) -> Any:  # noqa: ANN401, PLR0911 - an argument of torch, and JSON
        if isinstance(value, Tensor):
            return {VALUE: self._know(value)}
        if isinstance(value, list | tuple):
            return [self._encode(one) for one in value]
        if isinstance(value, dict):
            return {name: self._encode(one) for name, one in value.items()}
        if isinstance(value, float) and not math.isfinite(value):
            return {NUMBER: str(value)}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.ScriptObject):  # of a collective: its group, or how it reduces
            kind = str(value._type()).rpartition(".")[2]  # noqa: SLF001
            is_group = kind == "ProcessGroup"
            return (
                {GROUP: dist.get_process_group_ranks(dist.ProcessGroup.unbox(value))}
                if is_group
                else {TORCH: kind}
            )
        key = next((key for kind, key in _KEYS.items() if isinstance(value, kind)), None)
        if key is None:
            return {UNKNOWN: type(value).__name__}
        return {key: str(value).removeprefix("torch.")}


def numbers_in(value: Any) -> list[int]:  # noqa: ANN401 - JSON
    """Return the numbers of all tensors in the arguments of a step."""
    match value:
        case {"value": number}:
            return [number]
        case dict():
            return [number for one in value.values() for number in numbers_in(one)]
        case list() | tuple():
            return [number for one in value for number in numbers_in(one)]
    return []


def _written(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the arguments that an operation changes, as its schema says; those of collectives do not say it."""
    if func.namespace == "c10d":
        return [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    found = []
    for number, argument in enumerate(func._schema.arguments):  # noqa: SLF001 - no public name
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[number] if number < len(args) else None)
            found += [one for one in tree_leaves(value) if isinstance(one, Tensor)]
    return found


def _is_whole(tensor: Tensor) -> bool:
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def _share_memory(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)  # noqa: SLF001
