"""Which attributes of a configuration a model's source text names, in branches not taken as well."""

import inspect
import re
import sys
from functools import cache
from types import ModuleType

# Base classes that every model has: they read what all models have in common, and copy the rest.
_GENERAL = ("transformers.configuration_utils", "transformers.modeling_utils", "torch", "builtins")


def is_named_by(classes: tuple[type, ...], key: str) -> bool:
    """Whether the source of one of `classes` reads an attribute `key`, or a string `key`.

    Of a configuration's class its assignment counts too, of one that ships with transformers: there
    it is derived from other keys, and only written to config.json.
    """
    return any(
        re.search(_pattern(key, module.__name__), _source(module)) for module in _modules(classes)
    )


def _pattern(key: str, module: str) -> str:
    name = re.escape(key)
    own_code = module.startswith("transformers.models.")
    assigned = "" if own_code else r"(?!\s*=[^=])"
    quoted = "" if ".configuration_" in module else rf"|[\"']{name}[\"']"
    return rf"\.{name}\b{assigned}{quoted}"


def _modules(classes: tuple[type, ...]) -> list[ModuleType]:
    names = {
        base.__module__
        for one in classes
        for base in one.__mro__
        if not base.__module__.startswith(_GENERAL)
    }
    return [sys.modules[name] for name in sorted(names) if name in sys.modules]


@cache
def _source(module: ModuleType) -> str:
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):
        return ""
