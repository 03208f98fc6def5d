"""A router's choice of experts for each token, read at the call of a group of experts.

A group of experts gets the tokens, the chosen experts and their weights, wherever the router is.

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
    """An operation that selected the `count` largest of each row of `scores`, (R, any)."""

    scores: Tensor
    count: int


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """The indices and weights, (R, k), that a group of experts is called with; R includes padding."""

    module: str
    step: int
    """Number of the root call since tracing began."""
    call: int
    """Number of the module's call in the step."""
    indices: Tensor
    weights: Tensor
    selections: tuple[Selection, ...] = ()
    """Selections since the previous call of experts, in order; empty if `modules` is given."""


class ChoiceHandler(Protocol):
    """Observes or replaces choices."""

    def choose(self, choice: ExpertChoice) -> tuple[Tensor, Tensor] | None:
        """Return other indices and weights for the experts, or None to keep the choice."""


@dataclass
class ChoiceTracer:
    """Calls `handler` with every choice of experts while a model runs."""

    handler: ChoiceHandler
    modules: frozenset[str] | None = None
    """Paths of the groups of experts; None to find them, and to record selections."""
    _step: int = -1
    _calls: dict[str, int] = field(default_factory=dict)
    _selections: list[Selection] = field(default_factory=list)

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Watch one run of `model` inside this context; its first root call has step 0."""
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
    """Return False for torch's own layers: a model calls thousands of them."""
    return not type(module).__module__.startswith("torch.nn.")


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


class _SelectionWatcher(TorchFunctionMode):
    """Keeps the scores of every operation that selects the largest of each row."""

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
