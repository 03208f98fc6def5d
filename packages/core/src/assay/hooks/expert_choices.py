"""A router's choice of experts for each token, and an indexer's choice of keys.

A group of experts gets the tokens, the chosen experts and their weights, wherever the router is. That of Llama 4 gets
tokens alone, each weighted for every expert; its router's `torch.topk` is the choice. So is that of an indexer, a
module that returns only integers, as of DeepSeek V3.2.

Shape legend: R tokens, k experts or keys for each, E experts or keys.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from assay.hooks.module_tracer import ActiveCall, ModuleTracer, NullHandler
from assay.hooks.suspension import Arguments, Function, FunctionMode

_SELECTING = frozenset({torch.topk, Tensor.topk})
_MAXIMIZING = frozenset({torch.max, Tensor.max, torch.argmax, Tensor.argmax})


@dataclass(frozen=True, slots=True)
class Selection:
    """An operation that selected the `count` largest of each row of `scores`, (R, any)."""

    scores: Tensor
    count: int


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """The indices and weights, (R, k), that a group of experts is called with; R includes padding.

    Of an indexer the keys and their scores.
    """

    module: str
    step: int
    """Number of the root call since tracing began."""
    call: int
    """Number of the module's call in the step; of an indexer, of its choice."""
    indices: Tensor
    weights: Tensor
    selections: tuple[Selection, ...] = ()
    """Selections since the previous call of experts, in order; empty unless the tracer keeps them."""


@dataclass
class ChoiceTracer(NullHandler):
    """Calls `choose` with every choice of experts while a model runs."""

    choose: Callable[[ExpertChoice], tuple[Tensor, Tensor] | None]
    """Returns other indices and weights for the experts, or None to keep the choice."""
    modules: frozenset[str] | None = None
    """Paths of the groups of experts and the indexers; None to find them, and to keep selections."""
    keeps_selections: bool = False
    """Keep selections although `modules` is given."""
    _selections: list[Selection] = field(default_factory=list)
    _has_experts: bool = False
    _weighted: dict[str, tuple[str, int]] = field(default_factory=dict)
    """By path of the module around it: the path of a group of experts that gets tokens alone, and their number."""
    _indexers: frozenset[str] = frozenset()
    """Paths in `modules` that are not groups of experts."""
    _undecided: list[tuple[str, Any, Selection]] = field(default_factory=list)
    """Path, `torch.topk` result and selection of running modules. A module that returns only integers is an indexer."""
    _running: list[str] = field(default_factory=list)
    """Paths of the running calls, outermost first."""
    _step: int = 0
    _calls: Counter[str] = field(default_factory=Counter)
    """Choices in this root call, by indexer and by group of experts in `_weighted`."""
    _watching: ExitStack = field(default_factory=ExitStack)
    """The hooks on the model."""
    _selecting: ExitStack = field(default_factory=ExitStack)
    """The watcher of selections, during a root call."""

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Watch one run of `model` inside this context; its first root call has step 0.

        Without experts, the watch ends with the first root call.
        """
        self._has_experts = any(map(_holds_experts, model.modules()))
        self._weighted = dict(_list_weighted(model))
        self._indexers = frozenset(
            path
            for path, module in model.named_modules()
            if path in (self.modules or ()) and not _holds_experts(module)
        )
        with self._watching, self._selecting:
            self._watching.enter_context(ModuleTracer(self).attached(model))
            yield

    def enter(self, active: ActiveCall) -> None:
        """Handle the choice of a call of experts."""
        site, arguments = active.call.site, active.arguments
        if active.call.caller is None:
            self._step = site.step
            for of_call in (self._selections, self._running, self._calls, self._undecided):
                of_call.clear()
            self._selecting.close()  # of a root call that ended by an exception
            if self._keeps or self._weighted or self._indexers:
                self._selecting.enter_context(FunctionMode(self._call_function))
        self._running.append(site.module)
        if not self._is_watched(active) or (keys := find_choice_arguments(arguments)) is None:
            return
        indices, weights = keys
        self._has_experts = True
        selections, self._selections[:] = tuple(self._selections), []
        given = arguments[indices], arguments[weights]
        chosen = self.choose(ExpertChoice(site.module, site.step, site.call, *given, selections))
        if chosen is not None:
            arguments[indices], arguments[weights] = chosen

    def leave(self, active: ActiveCall, output: Any) -> Any:  # noqa: ANN401 - see TraceHandler
        """Handle the choices of an indexer, and return the output unchanged."""
        module = active.call.site.module
        while self._running and self._running.pop() != module:
            pass  # calls that ended by an exception
        own = [one for one in self._undecided if one[0] == module]
        if own:
            self._undecided = [one for one in self._undecided if one[0] != module]
            if isinstance(output, Tensor) and not output.is_floating_point():
                self._has_experts = True
                for _, result, selection in own:
                    self._choose_at(module, result, selection)
        return output

    def finish_root(self, active: ActiveCall) -> None:
        """End the watch of selections, and of a model without experts."""
        del active
        self._selecting.close()
        if self.modules is None and not self._has_experts:
            self._watching.close()

    def _call_function(self, func: Function, args: Arguments, kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - whatever func returns
        """Call a function, and keep the scores if it selects the largest of each row."""
        result = func(*args, **kwargs)
        if func in _SELECTING or func in _MAXIMIZING:
            scores = args[0] if args else kwargs.get("input")
            if isinstance(scores, Tensor) and scores.ndim > 1 and scores.is_floating_point():
                count = 1
                if func in _SELECTING:
                    count = int(args[1] if len(args) > 1 else kwargs["k"])
                selection = Selection(scores.detach().flatten(0, -2), count)
                experts = self._find_weighted(scores.shape[-1])
                if experts is not None and func in _SELECTING:
                    return self._choose_at(experts, result, selection)
                if self._keeps:
                    self._selections.append(selection)
                running = self._running[-1] if self._running else ""
                if func in _SELECTING and result.indices.shape[:-1] == scores.shape[:-1]:
                    if running in self._indexers:
                        return self._choose_at(running, result, selection)
                    if self.modules is None and running:
                        self._undecided.append((running, result, selection))
        return result

    @property
    def _keeps(self) -> bool:
        return self.modules is None or self.keeps_selections

    def _find_weighted(self, num_scores: int) -> str | None:
        """Return the path of the group of experts whose running router has this number of scores."""
        for around, (experts, num_experts) in self._weighted.items():
            is_wanted = self.modules is None or experts in self.modules
            if is_wanted and num_experts == num_scores and around in self._running:
                return None if experts in self._running else experts
        return None

    def _choose_at(self, experts: str, result: Any, selection: Selection) -> Any:  # noqa: ANN401 - of torch.topk
        """Handle the choice of a router or an indexer, and return its result. Skip a topk that keeps every score."""
        if selection.count >= selection.scores.shape[1]:
            return result
        call = self._calls[experts]
        self._calls[experts] += 1
        values, indices = result
        given = indices.flatten(0, -2), values.flatten(0, -2)
        chosen = self.choose(ExpertChoice(experts, self._step, call, *given, (selection,)))
        if chosen is None:
            return result
        parts = chosen[1].view_as(values), chosen[0].view_as(indices)
        return torch.return_types.topk(parts)

    def _is_watched(self, active: ActiveCall) -> bool:
        path = active.call.site.module
        if self.modules is not None:
            return path in self.modules
        return path != "" and not _is_of_torch(active.module)


def _is_of_torch(module: nn.Module) -> bool:
    """Return True for torch's own layers. A model has thousands, and none is a group of experts."""
    return type(module).__module__.startswith("torch.nn.")


def _holds_experts(module: nn.Module) -> bool:
    return not _is_of_torch(module) and count_experts(module) > 0


def _list_weighted(model: nn.Module) -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield the path around each group of experts that gets tokens alone, with its path and number of experts."""
    for path, module in model.named_modules():
        if path and not _is_of_torch(module) and (number := _count_fused(module)) > 1:
            arguments = [*inspect.signature(module.forward).parameters.values()]
            if len(arguments) == 1 and arguments[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
                yield path.rpartition(".")[0], (path, number)


def _count_fused(module: nn.Module) -> int:
    """Count the experts whose weights are one tensor (E, any, any)."""
    return next((len(item) for item in module.parameters(recurse=False) if item.ndim == 3), 0)


def count_experts(module: nn.Module) -> int:
    """Count the experts of a module; return 0 unless it is a group of experts."""
    numbered = sum(name.isdecimal() for name, _ in module.named_children())
    named = getattr(module, "num_experts", None)
    return _count_fused(module) or numbered or (named if isinstance(named, int) else 0)


def find_choice_arguments(arguments: dict[Any, Any]) -> tuple[Any, Any] | None:
    """Return the keys of indices and weights among a module's arguments, None unless it gets both.

    Shapes: indices and weights (R, k); the tokens, (R, C), are another argument.
    """
    tables = {
        key: value
        for key, value in arguments.items()
        if isinstance(value, Tensor) and value.ndim == 2
    }
    for key, indices in tables.items():
        if indices.is_floating_point() or indices.dtype is torch.bool:
            continue
        floating = {
            name: value
            for name, value in tables.items()
            if value.is_floating_point() and len(value) == len(indices)
        }
        weights = [name for name, value in floating.items() if value.shape == indices.shape]
        if len(weights) == 1 and len(floating) > 1:
            return key, weights[0]
    return None
