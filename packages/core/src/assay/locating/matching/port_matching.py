"""Matching of the ports of a running call with those of its recorded partner."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import Any

from assay.hooks.values.nested import iterate_leaves, iterate_tensors

# Argument names with one meaning in all Hugging Face models.
_STANDARD = frozenset(
    {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "cache_position"}
)


def recorded_names(arguments: Mapping[str, Any], ports: tuple[str, ...]) -> dict[str, str]:
    """Map each argument to its name in the trace, which may differ between classes."""
    recorded = _names_of(ports)
    names = {name: name for name in arguments}
    ours = [
        name
        for name, value in arguments.items()
        if name not in recorded and name not in _STANDARD and iterate_tensors(value, name)
    ]
    if not ours:
        return names
    theirs = [name for name in recorded if name not in arguments and name not in _STANDARD]
    if len(ours) == len(theirs):
        names.update(zip(ours, theirs, strict=True))
    return names


@lru_cache(maxsize=4096)
def _names_of(ports: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the arguments among `ports`."""
    return tuple(dict.fromkeys(port.split(".")[1] for port in ports if _is_input(port)))


def missing_ports(
    ports: tuple[str, ...], seen: AbstractSet[str], arguments: Mapping[str, Any], output: object
) -> list[str]:
    """Return the recorded `ports` that are missing in a call.

    seen: the ports that it has. An optional argument or result that is None is not missing.
    """
    absent = set(ports) - seen
    if not absent:
        return []
    given = {f"input.{name}" for name in recorded_names(arguments, ports).values()}
    offered_none = {
        port
        for name, value in [*arguments.items(), ("", output)]
        for port, leaf in iterate_leaves(value, f"input.{name}" if name else "output")
        if leaf is None
    } | {port for port in absent if _is_input(port) and ".".join(port.split(".")[:2]) not in given}
    return sorted(absent - offered_none)


def ancestors(module: str) -> list[str]:
    """Return the paths of the modules around `module`, the model itself ("") first."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(len(parts))] if module else []


def _is_input(port: str) -> bool:
    return port.startswith("input.")
