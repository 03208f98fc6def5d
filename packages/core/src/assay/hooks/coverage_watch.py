"""The modules, parameters, experts and cache slots that a model's runs use.

Shape legend: R tokens, k experts for each, E experts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from assay.hooks.caches import count_tokens, find_caches
from assay.hooks.expert_choices import count_experts, find_choice_arguments
from assay.hooks.module_tracer import ActiveCall, TraceHandler
from assay.hooks.suspension import Arguments, Function, FunctionMode
from assay.hooks.tensors import iterate_tensors
from assay.sites import RowMap, unwrapped_path

# Most rows of position ids that a model has: time, height, width and text.
_MOST_POSITION_ROWS = 4

# Functions that read only dtype, device or shape of an argument.
_READ_NO_VALUE = ("new_", "size", "stride", "dim", "numel", "element_size", "is_", "requires_grad")
_READ_FIRST_VALUE = frozenset({"to", "type_as", "view_as", "expand_as", "reshape_as"})


@dataclass
class UsageWatch:
    """A handler that notes the usage of each call, and passes the call on to `handler`."""

    handler: TraceHandler
    root_only: bool = False
    """True to watch the root calls alone, for the positions of caches."""
    called: set[str] = field(default_factory=set)
    """Modules that were called with values to compute with."""
    read: set[str] | None = None
    """Parameters whose values an operation read; None if reads are not watched."""
    routed: dict[str, Tensor] = field(default_factory=dict)
    """Number of tokens of each expert of a group, without padding, (E,)."""
    varied: dict[str, bool] = field(default_factory=dict)
    """For each port of position ids, True if its rows ever differed."""
    slots: list[tuple[int, int]] = field(default_factory=list)
    """Positions written and read in each cache, in order of first use."""
    _owners: dict[str, list[str]] = field(default_factory=dict)
    _names: dict[int, list[str]] = field(default_factory=dict)
    _num_experts: dict[str, int] = field(default_factory=dict)
    _settled: set[str] = field(default_factory=set)
    """Modules whose further calls tell nothing new."""
    _num_running: int = 0
    """Open root calls, and contexts of `reading_between_calls`."""
    _reads: FunctionMode | None = None

    def add_parameters_of(self, model: nn.Module) -> None:
        """Note the parameters that each module of `model` owns."""
        for path, parameter in model.named_parameters(remove_duplicate=False):
            owner, _, last = path.rpartition(".")
            owner = unwrapped_path(owner)
            name = f"{owner}.{last}" if owner else last
            names = self._owners.setdefault(owner, [])
            names += [name] if name not in names else []
            self._names.setdefault(id(parameter), []).append(name)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Note, inside this context, the parameters that operations of a forward pass read."""
        self.read = set()
        try:
            yield
        finally:
            self._num_running = 0  # after a root call that ended by an exception
            self._stop_reading()

    @contextmanager
    def reading_between_calls(self) -> Iterator[None]:
        """Inside `reading`, note reads outside of root calls, too: `generate` reads an image before the first one."""
        self._start_reading()
        try:
            yield
        finally:
            self._num_running -= 1
            self._stop_reading()

    def _start_reading(self) -> None:
        """Watch operations, unless all parameters have been read."""
        self._num_running += 1
        if self._reads is None and self.unread:
            self._reads = FunctionMode(self._call_function)
            self._reads.__enter__()  # type: ignore[no-untyped-call]

    def _stop_reading(self) -> None:
        """End the watch where it began: torch takes off the mode that was entered last."""
        if self._reads is not None and not self._num_running:
            reads, self._reads = self._reads, None
            reads.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _call_function(self, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - whatever func returns
        """Call a function, and note the parameters whose values it reads."""
        result = func(*args, **kwargs)
        for number, value in enumerate((*args, *kwargs.values())):
            if _reads_value(func, result, number):
                for item in value if isinstance(value, (list, tuple)) else (value,):
                    self._note_read(item)
        return result

    def _note_read(self, value: object) -> None:
        if self.read is not None and self._num_running:
            self.read.update(self._names.get(id(value), ()))

    def enter(self, active: ActiveCall) -> None:
        """Note the usage of a call."""
        if active.call.caller is None:
            self._start_reading()
            self._note_slots(active)
        if active.call.site.module not in self._settled:
            self._note_usage(active)
        self.handler.enter(active)

    def _note_usage(self, active: ActiveCall) -> None:
        path, arguments = active.call.site.module, active.arguments
        tensors = list(iterate_tensors(arguments, path))
        if not tensors or any(tensor.numel() for _, tensor in tensors):
            self.called.add(path)
        if path not in self._num_experts:
            self._num_experts[path] = count_experts(active.module)
        if self._num_experts[path]:
            counts = count_expert_tokens(active.module, arguments, active.call.rows)
            if counts is not None:
                self.routed[path] = counts + self.routed.get(path, torch.zeros_like(counts))
        for port, tensor in tensors:
            self._note_read(tensor)  # the module gets a copy
            if _has_rows_of_positions(tensor):
                differ = bool((tensor != tensor[:1]).any())
                self.varied[port] = self.varied.get(port, False) or differ
        # Another call with such tensors may tell more.
        may_learn = self._reads is not None or any(
            _has_rows_of_positions(one) for _, one in tensors
        )
        if path in self.called and not self._num_experts[path] and not may_learn:
            self._settled.add(path)

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - see TraceHandler
        """Note the parameters that the call returns, and pass it on."""
        if self._reads is not None:
            for _, tensor in iterate_tensors(output, ""):
                self._note_read(tensor)  # the caller gets a copy
        return self.handler.leave(active, output)

    def finish_root(self, active: ActiveCall) -> None:
        """Pass the call on."""
        self._num_running -= 1
        self._stop_reading()
        self.handler.finish_root(active)

    @property
    def unread(self) -> set[str]:
        """Return the parameters that no operation read; none if reads were not watched."""
        names = {name for names in self._names.values() for name in names}
        return set() if self.read is None else names - self.read

    def to_json(self) -> dict[str, Any]:
        """Return the fields of `assay.judge.coverage.Usage` that a watch knows."""
        return {
            "parameters": self._owners,
            "called": sorted(self.called),
            "read": None if self.read is None else sorted(self.read),
            "experts": {path: counts.tolist() for path, counts in self.routed.items()},
            "equal_rows": sorted(port for port, varied in self.varied.items() if not varied),
            "cache_slots": sum(written for written, _ in self.slots),
            "cache_slots_read": sum(read for _, read in self.slots),
        }

    def _note_slots(self, active: ActiveCall) -> None:
        caches = find_caches(active.arguments)
        rows = active.call.rows
        if not caches or rows is None:
            return
        if (past := count_tokens(caches[0][1])) is None:
            return  # a cache of linear layers has no slots
        if past == 0 or not self.slots:
            self.slots.append((0, 0))
        self.slots[-1] = (past + rows.length) * rows.num_rows, past * rows.num_rows


def count_expert_tokens(
    module: nn.Module, arguments: dict[str, Any], rows: RowMap | None
) -> Tensor | None:
    """Count the tokens of each expert in a call, (E,), without padding; None for other modules.

    A group of experts gets indices (R, k), a list of E counts, or the tokens once per expert,
    (E * R, C), with zeros for tokens that an expert does not compute.
    """
    num_experts = count_experts(module)
    fused = any(item.ndim == 3 for item in module.parameters(recurse=False))
    of_tokens = None if rows is None else torch.tensor(rows.positions).flatten() >= 0
    keys = find_choice_arguments(arguments) if num_experts else None
    if keys is not None:
        indices = arguments[keys[0]].detach().cpu()
        if of_tokens is not None and len(indices) == len(of_tokens):
            indices = indices[of_tokens]
        inside: Tensor = indices[(indices >= 0) & (indices < num_experts)]
        return inside.long().bincount(minlength=num_experts)
    for value in arguments.values() if fused else ():
        if isinstance(value, list) and len(value) == num_experts:
            return torch.tensor([int(count) for count in value])
    if fused and len(arguments) == 1:
        (tokens,) = arguments.values()
        if isinstance(tokens, Tensor) and tokens.ndim == 2 and len(tokens) % num_experts == 0:
            computed = tokens.detach().cpu().unflatten(0, (num_experts, -1)).ne(0).any(2)
            if of_tokens is not None and computed.shape[1] == len(of_tokens):
                computed = computed & of_tokens
            counts: Tensor = computed.sum(1)
            return counts
    return None


def _has_rows_of_positions(tensor: Tensor) -> bool:
    """Return True if a value may hold several rows of position ids, (rows, B, T)."""
    is_index = not tensor.is_floating_point() and tensor.dtype is not torch.bool
    return is_index and tensor.ndim == 3 and 1 < len(tensor) <= _MOST_POSITION_ROWS


def _reads_value(func: Callable[..., Any], result: object, number: int) -> bool:
    """Return True if `func` reads more of its argument than dtype, device and shape."""
    name = getattr(func, "__name__", "")
    if name == "__get__":  # attribute access: `.T` returns a view, `.dtype` does not
        return isinstance(result, Tensor)
    if name.endswith("_like") or name.startswith(_READ_NO_VALUE):
        return False
    return number == 0 or name not in _READ_FIRST_VALUE
