"""Training states in the format of torch.distributed.checkpoint, for any number of ranks.

Tensors are stored under the names of the whole model's parameters, so that a checkpoint of one mesh
can be read on another.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from assay.errors import MachineError
from assay.parallel.checkpoints.weight_loading import name_difference, tied_names

_Stored = Mapping[str, TensorStorageMetadata | BytesStorageMetadata]

_MODEL, _MOMENTS, _GROUPS, _EXTRA = "model", "moments", "groups", "extra"


@dataclass(frozen=True, slots=True)
class _Pickled:
    """A value to store as one pickle; the keys of dicts and lists would be stored separately."""

    value: Any


def _make_state_error(folder: Path, missing: Iterable[str], extra: Iterable[str]) -> MachineError:
    """Make the error for names that the checkpoint lacks (`missing`) or no rank has (`extra`)."""
    names = name_difference(missing, extra)
    return MachineError(f"{folder} does not hold the state of this model; {names}")


def save_checkpoint(
    folder: Path,
    stages: Iterable[nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write this rank's part of a training state; called on all ranks.

    stages: the modules of this rank: the model, or its stages of a pipeline.
    extra: other state that can be pickled, such as the number of steps; one rank's is stored.
    """
    modules = [*stages]
    state: dict[str, Any] = {
        f"{_MODEL}.{name}": held[0] for name, held in _weights(modules).items()
    }
    if optimizer is not None:
        for name, held in _trained(modules, optimizer).items():
            for key, value in optimizer.state.get(held[0], {}).items():
                state[f"{_MOMENTS}.{name}.{key}"] = value
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        state[_GROUPS] = _Pickled(groups)
    state[_EXTRA] = _Pickled(dict(extra or {}))
    save(state, checkpoint_id=folder)


def load_checkpoint(
    folder: Path, stages: Iterable[nn.Module], optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Load a training state that any number of ranks have written. Called on all ranks.

    Each rank reads only its shards, into the modules and the optimizer.
    Returns: the saved `extra`.
    Raises: MachineError, before any value is read, with the missing, misshapen and extra names.
    """
    modules = [*stages]
    stored = _read_names(folder)
    weights = _weights(modules)
    state: dict[str, Any] = {f"{_MODEL}.{name}": held[0] for name, held in weights.items()}
    _check_all_have_a_place(folder, state, stored)
    trained = {} if optimizer is None else _trained(modules, optimizer)
    moments = _moments_of(folder, trained, stored)
    for name, kinds in moments.items():
        for kind in kinds:
            key = f"{_MOMENTS}.{name}.{kind}"
            state[key] = _moment_like(stored[key], trained[name][0])
    state[_EXTRA] = None
    if optimizer is not None:
        state[_GROUPS] = None
    _check_shapes(folder, state, stored)
    load(state, checkpoint_id=folder)
    for name, held in weights.items():
        for other in held[1:]:
            other.copy_(state[f"{_MODEL}.{name}"])
    if optimizer is not None:
        optimizer.state.clear()
        for name, kinds in moments.items():
            for parameter in trained[name]:
                values = {kind: state[f"{_MOMENTS}.{name}.{kind}"] for kind in kinds}
                # Each copy of a tied parameter has its own state.
                optimizer.state[parameter] = copy.deepcopy(values)
        for group, kept in zip(optimizer.param_groups, state[_GROUPS].value, strict=True):
            group.update(kept)
    return cast("dict[str, Any]", state[_EXTRA].value)


def _read_names(folder: Path) -> _Stored:
    """Read the metadata of every stored value, by name. Raises: MachineError for other folders."""
    try:
        return FileSystemReader(folder).read_metadata().state_dict_metadata
    except (OSError, EOFError) as error:
        raise MachineError(f"{folder} holds no distributed checkpoint: {error}") from error


def _weights(modules: Iterable[nn.Module]) -> dict[str, list[Tensor]]:
    """Return this rank's tensors, by stored name."""
    found: dict[str, list[Tensor]] = {}
    for module in modules:
        named = module.state_dict(keep_vars=True).items()
        _add_by_stored_name(module, named, found)
    return {name: [tensor.detach() for tensor in held] for name, held in found.items()}


def _trained(
    modules: Iterable[nn.Module], optimizer: torch.optim.Optimizer
) -> dict[str, list[Tensor]]:
    """Return this rank's parameters that `optimizer` updates, by stored name."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found: dict[str, list[Tensor]] = {}
    for module in modules:
        named = [(name, p) for name, p in module.named_parameters() if id(p) in trained]
        _add_by_stored_name(module, named, found)
    return found


def _add_by_stored_name(
    module: nn.Module, named: Iterable[tuple[str, Tensor]], found: dict[str, list[Tensor]]
) -> None:
    """Add `named` to `found`; copies of a tied parameter get the first stage's name."""
    tied = tied_names(module)
    for name, tensor in named:
        stored = name
        for second, own in tied.items():
            if name == second or name.endswith(f".{second}"):
                stored = name.removesuffix(second) + own
        held = found.setdefault(stored, [])
        if all(tensor is not other for other in held):
            held.append(tensor)


def _check_all_have_a_place(folder: Path, state: Mapping[str, Any], stored: _Stored) -> None:
    """Raise MachineError on all ranks if a weight is missing in `stored` or on all ranks."""
    names = [{*state}]
    if dist.is_initialized():
        names = [set()] * dist.get_world_size()
        dist.all_gather_object(names, {*state})
    wanted = set().union(*names)
    held = {name for name in stored if name.startswith(f"{_MODEL}.")}
    if wanted != held:
        raise _make_state_error(folder, wanted - held, held - wanted)


def _moments_of(folder: Path, trained: Iterable[str], stored: _Stored) -> dict[str, list[str]]:
    """Return the kinds of moments stored for each of `trained`.

    Raises: MachineError if only some parameters have moments.
    """
    kinds: dict[str, list[str]] = {}
    for key in stored:
        if key.startswith(f"{_MOMENTS}."):
            name, _, kind = key.removeprefix(f"{_MOMENTS}.").rpartition(".")
            kinds.setdefault(name, []).append(kind)
    # An optimizer that has not stepped, or has no moments, stored none at all.
    missing = [f"{_MOMENTS}.{name}" for name in trained if kinds and name not in kinds]
    if missing:
        raise _make_state_error(folder, missing, ())
    return {name: kinds[name] for name in trained if kinds}


def _check_shapes(folder: Path, state: Mapping[str, Any], stored: _Stored) -> None:
    if missing := state.keys() - stored.keys():
        raise _make_state_error(folder, missing, ())
    for name, value in state.items():
        found = stored[name]
        if not isinstance(value, Tensor) or not isinstance(found, TensorStorageMetadata):
            continue
        if tuple(found.size) != tuple(value.shape):
            raise MachineError(
                f"{folder}: {name} has the shape {[*found.size]}, {[*value.shape]} is needed"
            )


def _moment_like(
    stored: TensorStorageMetadata | BytesStorageMetadata, parameter: Tensor
) -> Tensor | None:
    """Allocate memory for one tensor of the optimizer's state.

    It is sharded like the parameter if it has its shape, otherwise (step counts) plain.
    """
    if not isinstance(stored, TensorStorageMetadata):
        return None
    dtype = stored.properties.dtype
    if tuple(stored.size) == tuple(parameter.shape):
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    # torch's optimizers keep step counts on the host.
    return torch.zeros(stored.size, dtype=dtype)
