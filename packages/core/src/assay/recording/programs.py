"""The operations that made one value, as a program that torch runs without the model.

A replay puts recorded values in the place of computed ones. So the operations that a value depends on end
at parameters and at recorded values, which are the program's inputs: a program holds one stage, in forward
or backward, wherever the stage's code is. Operations on one memory belong together: an operation that
writes to memory which the value is read from is part of the program.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from assay.hooks.suspension import is_suspended, suspended
from assay.hooks.tensors import copy_of
from assay.sites import Site

# Operations that return their argument unless autograd records them.
_SAME_TENSOR = frozenset({"aten.detach.default", "aten.alias.default", "aten.lift_fresh.default"})

# Operations that replace the content of their first argument.
_OVERWRITES = frozenset({"aten.copy_.default", "aten.zero_.default", "aten.fill_.Scalar"})

# Fused attention of the CPU.
_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
_ATTENTION_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"

# Beginnings of the names of operations on lists of tensors.
_OF_LISTS = ("_foreach_", "_fused_")

# Keyword arguments that change no value.
_USUAL = ("pin_memory", "layout")

# Packages that call operations for others.
_NOT_CALLERS = sys.stdlib_module_names | {"torch", "assay", "__main__"}


class Value(int):
    """The number of a tensor in the arguments of a step."""


class Group(tuple[int, ...]):
    """The ranks of a process group in the arguments of a step."""

    __slots__ = ()


class Step(NamedTuple):
    """One operation of a program."""

    operation: str
    """Such as "aten.mul.Tensor"."""
    args: list[Any]
    """A tensor is a `Value`, a process group a `Group`, a generator None."""
    kwargs: dict[str, Any]
    results: list[int]
    """Numbers of the new tensors; 0 for other results."""
    has_several: bool
    """True if the operation returns a tuple or list."""
    caller: str = ""
    """FILE:LINE of the code that ran it; "" if only torch and assay did."""


@dataclass(frozen=True, slots=True)
class Program:
    """The operations that made the value number `target`."""

    steps: Sequence[Step]
    inputs: Mapping[int, Tensor]
    """Tensors by their numbers."""
    names: Mapping[int, str]
    """Names of the inputs: of a parameter, or of a place in the model; not of every input."""
    target: int


class RecordedValue(NamedTuple):
    """A value of one side, the program that made it, and the right value."""

    site: Site
    program: Program
    reference: Program | None
    """The program of the reference; None before it is known, or if the reference does not make this value."""
    answer: Mapping[str, Tensor]
    """"right", and the rows of it that are compared: "compared", bool of its shape without the last dim."""
    error: float = 0.0
    """Relative to the right value; of values that must be equal, the share that differs."""
    rank: int = 0
    ranks: Sequence[Program] = ()
    """The programs of all ranks that made this value; empty if some ranks do not make it."""
    module_class: str = ""
    """Of the module of `site`."""


@dataclass
class ProgramRecorder(TorchDispatchMode):
    """Records every operation that runs inside it, unless assay itself computes."""

    model: nn.Module
    is_recording: Callable[[], bool] = lambda: True
    _operations: list[tuple[Step, set[int], set[int]]] = field(default_factory=list)
    """Each with the memory that it changes, and the tensors whose whole memory it overwrites without reading it."""
    _known: Any = field(default_factory=WeakIdKeyDictionary)  # Tensor -> number
    _inputs: dict[int, Tensor] = field(default_factory=dict)
    _unsaved: set[int] = field(default_factory=set)
    """Inputs whose memory no operation has changed."""
    _names_of: Any = field(default_factory=WeakIdKeyDictionary)  # Tensor -> str
    _numbers_read: dict[float, Tensor] = field(default_factory=dict)
    """Tensors of one element, by the Python number that was read from them."""
    _stale: set[int] = field(default_factory=set)
    """Memory that assay itself has written to: tensors there are inputs from then on."""
    _memory: dict[int, int] = field(default_factory=dict)
    """The number of the first tensor there, by number of a tensor."""

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            self._names_of[tensor] = name

    def name(self, tensor: Tensor, name: str) -> None:
        """Name a tensor that assay injects, or that is an argument of a module."""
        self._names_of[tensor] = name

    def alias(self, new: Tensor, known: Tensor) -> None:
        """Name a tensor like another one."""
        if (name := self._names_of.get(known)) is not None:
            self._names_of[new] = name

    def forget(self) -> None:
        """Begin again: what was made before is an input from now on."""
        made = self._operations, self._known, self._inputs, self._unsaved, self._numbers_read
        for one in made:
            one.clear()

    def overwrite(self, tensor: Tensor) -> None:
        """Expect that assay writes to a tensor: its content is an input of later operations."""
        if (known := self._known.get(tensor)) is not None:
            self._save(self._memory[known])
            self._stale.add(self._memory[known])

    def program_of(self, tensor: Tensor) -> Program:
        """Return the program of the operations so far that made a tensor; without steps for an input."""
        known, last = self._find(tensor)
        numbers, memory = {known}, {self._memory[known]}
        needed: list[Step] = [*last]
        for step, writes, replaced in reversed(self._operations):
            if numbers.isdisjoint(step.results) and memory.isdisjoint(writes):
                continue
            needed.append(self._narrowed(step, memory))
            reads = set(numbers_in(needed[-1][1:3]))
            numbers |= reads
            memory -= {self._memory[number] for number in replaced}
            made = numbers.intersection(step.results)
            memory |= {self._memory[number] for number in reads - replaced | made}
        read = {number: self._inputs[number] for number in sorted(numbers & self._inputs.keys())}
        names = {
            number: self._names_of[one] for number, one in read.items() if one in self._names_of
        }
        inputs = {number: copy_of(one.detach()).cpu() for number, one in read.items()}
        return Program(needed[::-1], inputs, names, last[0].results[0] if last else known)

    def _narrowed(self, step: Step, memory: set[int]) -> Step:
        """Return an operation on lists of tensors in place for those in `memory` alone."""
        is_of_lists = step.operation.split(".")[1].startswith(_OF_LISTS)
        first = step.args[0] if is_of_lists and step.args else None
        if not isinstance(first, list) or any(step.results):
            return step
        kept = [k for k, item in enumerate(first) if self._memory[item] in memory]

        def narrowed(value: Any) -> Any:  # noqa: ANN401 - an argument
            is_list = isinstance(value, list) and len(value) == len(first)
            return [value[k] for k in kept] if is_list else value

        kwargs = {name: narrowed(value) for name, value in step.kwargs.items()}
        return step._replace(args=[*map(narrowed, step.args)], kwargs=kwargs)

    def _find(self, tensor: Tensor) -> tuple[int, list[Step]]:
        """Return the number of a tensor, or of one in the same memory and the step that views it as `tensor`."""
        if self._known.get(tensor) is not None or type(tensor) not in (Tensor, nn.Parameter):
            return self._know(tensor), []
        read = self._numbers_read.get(float(tensor.detach())) if tensor.numel() == 1 else None
        if read is not None:
            return self._viewed(self._know(read), "view", [*tensor.shape])
        for one, known in list(self._known.items()):
            if self._memory[known] in self._stale or not _share_memory(one, tensor):
                continue
            if one.data_ptr() == tensor.data_ptr() and one.numel() == tensor.numel():
                is_same = one.shape == tensor.shape
                return (known, []) if is_same else self._viewed(known, "view", [*tensor.shape])
            if one.is_contiguous() and not one.storage_offset():
                sizes = [*tensor.shape], [*tensor.stride()], tensor.storage_offset()
                return self._viewed(known, "as_strided", *sizes)
        return self._know(tensor), []

    def _viewed(self, known: int, name: str, *sizes: Any) -> tuple[int, list[Step]]:  # noqa: ANN401 - arguments
        args = [Value(known), *sizes]
        return known, [Step(f"aten.{name}.default", args, {}, [self._new()], has_several=False)]

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
        if str(func) == "aten.cat.default":  # torch skips empty vectors, as of an empty cache
            args = [one for one in args[0] if one.shape != (0,)] or args[0], *args[1:]
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if any(isinstance(one, FakeTensor) for one in given):
            return func(*args, **kwargs)  # shapes alone, which DTensor asks for
        if any(type(one) not in (Tensor, nn.Parameter) for one in given):
            return NotImplemented  # a subclass computes with the tensors that it holds
        known = [self._know(one) for one in given]
        name = str(func).replace("._unsafe_", ".")  # which differ in autograd alone
        writes = {self._memory[self._know(one)] for one in _written(func, args, kwargs)}
        for memory in writes:
            self._save(memory)
        is_whole = name in _OVERWRITES and given[0].nbytes == given[0].untyped_storage().nbytes()
        usual = {k for k, v in kwargs.items() if k in _USUAL or v is torch.preserve_format}
        told = {name: value for name, value in kwargs.items() if name not in usual}
        step_args, step_kwargs = tree_map(self._encode, ([*args], told))
        result: Any = func(*args, **kwargs)
        if name in _SAME_TENSOR:
            self._known[result] = known[0]
            return result
        if isinstance(result, float):
            self._numbers_read[result] = given[0]
        several = isinstance(result, tuple | list)
        results = [self._add(one, given) for one in (result if several else (result,))]
        step = Step(name, step_args, step_kwargs, results, several, _find_caller())
        if name == _ATTENTION:  # as every device computes it: without what its backward reads
            step = step._replace(results=results[:1], has_several=False)
        elif name == _ATTENTION_BACKWARD:
            del step_args[4:6]
        self._operations.append((step, writes, {*known[:1]} if is_whole else set()))
        return result

    def _know(self, tensor: Tensor) -> int:
        """Return the number of an argument; a tensor that no operation made is an input."""
        known: int | None = self._known.get(tensor)
        if known is not None and self._memory[known] not in self._stale:
            return known
        known = self._known[tensor] = self._new()
        self._inputs[known] = tensor
        self._unsaved.add(known)
        return known

    def _new(self, memory: int = 0) -> int:
        number = len(self._memory) + 1
        self._memory[number] = memory or number
        return number

    def _add(self, result: object, given: Sequence[Tensor]) -> int:
        """Give a result a number; 0 if it is an argument, as of operations in place."""
        if not isinstance(result, Tensor) or self._known.get(result) is not None:
            return 0
        shared = [self._memory[self._know(one)] for one in given if _share_memory(one, result)]
        known = self._known[result] = self._new(*shared[:1])
        return known

    def _save(self, memory: int) -> None:
        """Copy the input in `memory`, which is about to change."""
        if memory in self._unsaved:
            self._unsaved.remove(memory)
            changing = self._inputs[memory]
            with suspended():
                self._inputs[memory] = copy_of(changing.detach())
            self.alias(self._inputs[memory], changing)

    def _encode(self, leaf: Any) -> Any:  # noqa: ANN401 - an argument of torch
        if isinstance(leaf, Tensor):
            return Value(self._know(leaf))
        if isinstance(leaf, torch.ScriptObject) and str(leaf._type()).endswith(".ProcessGroup"):  # noqa: SLF001
            return Group(dist.get_process_group_ranks(dist.ProcessGroup.unbox(leaf)))
        # Another process has neither a generator nor the rule by which a collective reduces.
        return None if isinstance(leaf, torch.ScriptObject | torch.Generator) else leaf


def _find_caller() -> str:
    """Return the line that called the running operation: that of the innermost function outside of torch and assay."""
    frame = sys._getframe(2)  # noqa: SLF001 - no public name
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_CALLERS:
            path = frame.f_code.co_filename.rpartition("/site-packages/")[2]
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def numbers_in(arguments: Any) -> list[int]:  # noqa: ANN401 - arguments of a step
    """Return the numbers of all tensors in the arguments of a step."""
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Value)]


def _written(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the arguments that an operation changes, as its schema says; those of collectives do not say it."""
    found: list[Any] = []
    for number, argument in enumerate(func._schema.arguments):  # noqa: SLF001 - no public name
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written or func.namespace == "c10d":
            value = kwargs.get(argument.name, args[number] if number < len(args) else None)
            found += tree_leaves(value)
    return [one for one in found if isinstance(one, Tensor)]


def _share_memory(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)  # noqa: SLF001
