"""Which experts compute each token: a router's choice, where a group of experts is called with it.

A group of experts gets the tokens, the chosen experts and their weights; whatever the router
computes, and wherever it stands, its choice passes this boundary.

Shape legend: R tokens, k experts for each, E experts.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from assay.hooks.module_tracer import find_called_modules, forget_compiled_graphs
from assay.hooks.suspension import is_suspended, suspended

_SELECTING = frozenset({torch.topk, Tensor.topk})
_MAXIMISING = frozenset({torch.max, Tensor.max, torch.argmax, Tensor.argmax})


@dataclass(frozen=True, slots=True)
class Selection:
    """An operation that picked the `count` largest of each row of `scores`, (R, anything)."""

    scores: Tensor
    count: int


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """The choice with which a group of experts is called.

    step: number of the root call since tracing began; call: of the module in it.
    indices, weights: (R, k); padding is among the tokens.
    selections: what was picked from, in order, since the last group of experts was called; empty
        where that is not watched.
    """

    module: str
    step: int
    call: int
    indices: Tensor
    weights: Tensor
    selections: tuple[Selection, ...] = ()


class ChoiceHandler(Protocol):
    """Called with every choice; returns the indices and weights that the experts get instead."""

    def choose(self, choice: ExpertChoice) -> tuple[Tensor, Tensor] | None:
        """None to leave the choice as it is."""


@dataclass
class ChoiceTracer:
    """Shows `handler` every choice of experts while a model runs.

    modules: paths of the groups of experts; None to try every module.
    """

    handler: ChoiceHandler
    modules: frozenset[str] | None = None
    _step: int = -1
    _calls: dict[str, int] = field(default_factory=dict)
    _selections: list[Selection] = field(default_factory=list)

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Show the choices of one run of `model`: its first root call has step 0."""
        self._step = -1
        handles = [
            model.register_forward_pre_hook(torch.compiler.disable(self._begin_root), prepend=True)
        ]
        for name, (module, _) in find_called_modules(model).items():
            watched = _may_be_experts(module) if self.modules is None else name in self.modules
            if name and watched:
                hook: Callable[..., Any] = torch.compiler.disable(self._hook(name))
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        forget_compiled_graphs()
        try:
            if self.modules is None:
                with _SelectionWatcher(self._selections):
                    yield
            else:
                yield
        finally:
            for handle in handles:
                handle.remove()
            forget_compiled_graphs()

    def _begin_root(self, module: nn.Module, args: object) -> None:
        del module, args
        self._step += 1
        self._calls.clear()
        self._selections.clear()

    def _hook(self, name: str) -> Callable[..., Any]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - as torch calls it
            del module
            given: dict[Any, Any] = dict(enumerate(args))
            given |= kwargs
            keys = find_choice_arguments(given)
            if keys is None or is_suspended():
                return None
            indices, weights = keys
            call = self._calls.get(name, 0)
            self._calls[name] = call + 1
            selections, self._selections[:] = tuple(self._selections), []
            choice = ExpertChoice(
                name, self._step, call, given[indices], given[weights], selections
            )
            with suspended():
                chosen = self.handler.choose(choice)
            if chosen is None:
                return None
            given[indices], given[weights] = chosen
            return tuple(given[number] for number in range(len(args))), {
                key: given[key] for key in kwargs
            }

        return enter


def _may_be_experts(module: nn.Module) -> bool:
    """Whether this is no layer of torch's own, of which a model calls thousands."""
    return not type(module).__module__.startswith("torch.nn.")


def find_choice_arguments(arguments: dict[Any, Any]) -> tuple[Any, Any] | None:
    """The keys of indices and weights among the arguments of a group of experts; None for others.

    Shapes: indices and weights (R, k), beside them the tokens, (R, C).
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


class _SelectionWatcher(TorchFunctionMode):
    """Keeps what every operation that picks the largest of each row picked from."""

    def __init__(self, selections: list[Selection]) -> None:
        super().__init__()
        self._selections = selections

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever func returns
        del types
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if (func in _SELECTING or func in _MAXIMISING) and not is_suspended():
            scores = args[0] if args else kwargs.get("input")
            if isinstance(scores, Tensor) and scores.ndim == 2 and scores.is_floating_point():
                count = 1
                if func in _SELECTING:
                    count = int(args[1] if len(args) > 1 else kwargs["k"])
                self._selections.append(Selection(scores.detach(), count))
        return result
