"""Ports of a running call, matched to those of its recorded partner."""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from assay.hooks.values.nested import iterate_leaves, iterate_tensors

# Arguments of Hugging Face models: each means the same wherever it stands, and none is another.
_STANDARD = frozenset(
    {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "cache_position"}
)


def recorded_names(arguments: Mapping[str, Any], ports: Iterable[str]) -> dict[str, str]:
    """For each argument the name that it has in the trace: another class may use another one."""
    recorded = list(dict.fromkeys(port.split(".")[1] for port in ports if _is_input(port)))
    names = {name: name for name in arguments}
    ours = [
        name
        for name, value in arguments.items()
        if name not in recorded and name not in _STANDARD and any(iterate_tensors(value, name))
    ]
    theirs = [name for name in recorded if name not in arguments and name not in _STANDARD]
    if len(ours) == len(theirs):
        names.update(zip(ours, theirs, strict=True))
    return names


def missing_ports(
    ports: Iterable[str],
    seen: AbstractSet[str],
    arguments: Mapping[str, Any],
    output: object,
) -> list[str]:
    """The recorded `ports` that a call does not have, and should.

    seen: those that it has. An optional argument that its code does not use, and a result that it
    leaves out, are None here, and not missing.
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
    """Paths of the modules around `module`, the model itself ("") first."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(len(parts))] if module else []


def _is_input(port: str) -> bool:
    return port.startswith("input.")
