"""torch.compile of a model with hooks: they run between two graphs."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# Limits of torch.compile on the graphs of one function.
_LIMITS = "recompile_limit", "accumulated_recompile_limit"


def outside_of_graphs(
    hook: Callable[..., Any], when_left_out: Callable[[], None]
) -> Callable[..., Any]:
    """Return a hook that torch.compile calls between two graphs, and leaves out of a whole graph.

    when_left_out: called when torch.compile leaves the hook out, since fullgraph=True forbids a break.
    """
    from torch._C._dynamo.eval_frame import get_eval_frame_callback
    from torch._dynamo.eval_frame import skip_code
    from torch._dynamo.symbolic_convert import InstructionTranslator

    uncompiled: Callable[..., Any] = torch.compiler.disable(hook)

    # torch.compile calls this function while it traces the hook. `torch._dynamo.error_on_graph_break`
    # sets the second attribute, which torch has from 2.9 on.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator] # torch gives it no types
    def is_left_out() -> bool:
        tracing: Any = InstructionTranslator.current_tx()
        is_whole = tracing.one_graph or getattr(tracing, "error_on_graph_break", False)
        if is_whole:
            when_left_out()
        return bool(is_whole)

    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the hook
        if torch.compiler.is_dynamo_compiling():
            return None if is_left_out() else uncompiled(*args, **kwargs)
        # Outside of compiled code no frame is compiled, and `uncompiled` would take longer than the hook.
        return (hook if get_eval_frame_callback() is None else uncompiled)(*args, **kwargs)

    # Otherwise torch.compile compiles this frame, too.
    skip_code(call.__code__)
    return call


@contextmanager
def graphs_for_each(num_modules: int) -> Iterator[None]:
    """Let torch.compile compile a function once for each module inside this context."""
    from torch._dynamo import config

    before = {name: getattr(config, name) for name in _LIMITS}
    # Not by `config.patch`, which has to end in the thread where it began.
    for name, limit in before.items():
        setattr(config, name, max(limit, num_modules))
    try:
        yield
    finally:
        for name, limit in before.items():
            setattr(config, name, limit)


def forget_compiled_graphs() -> None:
    """Make torch.compile trace again: graphs of a model without hooks do not call them."""
    dynamo = sys.modules.get("torch._dynamo")
    # On a GPU, a reset imports inductor, which takes seconds.
    if dynamo is not None and dynamo.convert_frame.input_codes.seen:
        torch.compiler.reset()


def find_compiled_modules(model: nn.Module) -> list[str]:
    """Return the paths of compiled modules, whose operations do not run one by one."""
    return [
        path or "the model"
        for path, module in model.named_modules()
        if module._compiled_call_impl is not None  # noqa: SLF001 - there is no public name
        or isinstance(module, torch._dynamo.OptimizedModule)  # noqa: SLF001
    ]
