"""The modules whose calls count, and the arguments of their calls by name."""

import inspect
from typing import Any

from torch import nn

from assay.sites import unwrapped_path


def find_called_modules(model: nn.Module) -> dict[str, tuple[nn.Module, nn.Module]]:
    """Return the module whose calls count, and the innermost wrapped one, by unwrapped path.

    A wrapper such as that of `torch.compile` and its module share a path, and their calls count as
    one call of the wrapper, whose result the caller gets. A checkpoint wrapper does not count:
    backward calls only the module inside.
    """
    found: dict[str, tuple[nn.Module, nn.Module]] = {}
    for path, module in model.named_modules():
        name = unwrapped_path(path)
        if hasattr(module, "_checkpoint_wrapped_module"):
            continue
        outermost = found[name][0] if name in found else module
        found[name] = outermost, module
    return found


class Signature:
    """Converts the arguments of a forward method to names, and back to the form of the call.

    Positional arguments stay positional: wrappers of Hugging Face read only keywords.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names = []
        self._rest = "args"
        # Of the class: a setup function may have replaced `forward` of the instance.
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                self._names.append(parameter.name)
            elif parameter.kind is parameter.VAR_POSITIONAL:
                self._rest = parameter.name

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments by name, those of `*args` as one tuple."""
        arguments: dict[str, Any] = dict(zip(self._names, args, strict=False))
        if len(args) > len(self._names):
            arguments[self._rest] = args[len(self._names) :]
        return arguments | kwargs

    def unbind(
        self, arguments: dict[str, Any], num_positional: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with `num_positional` positional ones."""
        kwargs = dict(arguments)
        args = tuple([kwargs.pop(name) for name in self._names[:num_positional]])
        if num_positional > len(self._names):
            args += tuple(kwargs.pop(self._rest))
        return args, kwargs
