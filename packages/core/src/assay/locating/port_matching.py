"""Names by which a running call and its recorded partner know the same things."""

from collections.abc import Iterable, Mapping
from typing import Any

from assay.hooks.nested import iterate_tensors


def recorded_names(arguments: Mapping[str, Any], ports: Iterable[str]) -> dict[str, str]:
    """For each argument the name that it has in the trace: another class may use another one."""
    recorded = list(dict.fromkeys(port.split(".")[1] for port in ports if _is_input(port)))
    names = {name: name for name in arguments}
    ours = [
        name
        for name, value in arguments.items()
        if name not in recorded and any(iterate_tensors(value, name))
    ]
    theirs = [name for name in recorded if name not in arguments]
    if len(ours) == len(theirs):
        names.update(zip(ours, theirs, strict=True))
    return names


def ancestors(module: str) -> list[str]:
    """Paths of the modules around `module`, the model itself ("") first."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(len(parts))] if module else []


def _is_input(port: str) -> bool:
    return port.startswith("input.")
