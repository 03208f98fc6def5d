"""Collects, injects and measures a trainer's state between two steps, by names that all trainers share."""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from assay.errors import UsageError
from assay.hooks.tensors import cast_within_range
from assay.models.inspect.report import SetupChanges
from assay.models.inspect.weights import coarser_dtype, measure_difference
from assay.sites import unwrapped_path
from assay.training.protocol import Trainer
from assay.training.reports import HeldPart, KeptPrecision, StateValue, TrajectoryRecord
from assay.training.state.files import fingerprint, hash_value
from assay.training.state.parameters import (
    coordinates_of,
    local_part,
    moment_like,
    named_parameters,
    put,
    whole,
)


def generator_states(torch_device: str) -> dict[str, Any]:
    """Return the states of all generators, as tensors and JSON values.

    Returns: `python`, `numpy` and `torch` (the host's), and `device` unless that is the host.
    """
    numpy_state: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - what model code draws from
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy_state
        | {
            "state": {
                "key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
                "pos": numpy_state["state"]["pos"],
            }
        },
        "torch": torch.get_rng_state(),
    }
    device = torch.device(torch_device)
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return states


def restore_generators(states: Mapping[str, Any], torch_device: str) -> None:
    """Restore the states that `generator_states` returned, perhaps on the host.

    The generator of an accelerator stays as it is if `states` has no `device`.
    """
    random.setstate(states["python"])
    numpy_state = states["numpy"]
    key = numpy_state["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state(  # noqa: NPY002 - as above
        dict(numpy_state) | {"state": {"key": key, "pos": numpy_state["state"]["pos"]}}
    )
    torch.set_rng_state(states["torch"])
    device = torch.device(torch_device)
    if device.type != "cpu" and "device" in states:
        torch.get_device_module(device).set_rng_state(states["device"], device)


class DrawnGenerators:
    """Finds the generators that the steps of a run draw from.

    Make each step inside of `observed`, and read `names` at the end.
    """

    def __init__(self, torch_device: str) -> None:
        self._torch_device = torch_device
        self.names: frozenset[str] = frozenset()
        """Generators whose state a step has changed: `python`, `numpy`, `torch`, `device`."""

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Observe one step inside this context."""
        before = self.hashes()
        yield
        after = self.hashes()
        self.names |= {name for name, value in before.items() if after[name] != value}

    def states(self) -> dict[str, Any]:
        """Return the current state of each generator."""
        return generator_states(self._torch_device)

    def restore(self, states: Mapping[str, Any]) -> None:
        """Restore what `states` returned."""
        restore_generators(states, self._torch_device)

    def hashes(self) -> dict[str, str]:
        """Return a hash of the current state of each generator."""
        states = self.states()
        return {name: repr(fingerprint({name: state})) for name, state in states.items()}


State = dict[str, Any]

# Required keys of a trainer's state.
_PARTS = ("model", "optimizer", "generators")


def plain_name(name: str) -> str:
    """Return the name of a parameter or buffer in the unwrapped model."""
    owner, _, last = name.rpartition(".")
    path = unwrapped_path(owner)
    return f"{path}.{last}" if path else last


def current_state(trainer: Trainer, torch_device: str) -> State:
    """Return parameters, moments by parameter, and generators, whole, on the host.

    Tensors may share memory with the trainer's: use them before its next step.
    """
    model = {
        plain_name(name): _on_host(value) for name, value in trainer.model.state_dict().items()
    }
    names = _names_by_id(trainer.model)
    moments = {
        names[id(parameter)]: {key: _on_host(value) for key, value in values.items()}
        for parameter, values in trainer.optimizer.state.items()
        if id(parameter) in names
    }
    return {
        "model": model,
        "moments": moments,
        "generators": generator_states(torch_device),
        "trainable": sorted(
            item.name for item in named_parameters(trainer.model) if item.tensor.requires_grad
        ),
    }


def collect_state(trainer: Trainer, torch_device: str) -> State:
    """Return a copy of `current_state`."""
    return _with_values(current_state(trainer, torch_device), _copy, _copy)


def round_state(state: State, dtype: torch.dtype, moments: torch.dtype | None = None) -> State:
    """Return a copy with parameters in `dtype` and moments in `moments`, by default the same."""

    def rounded(value: object, to: torch.dtype) -> object:
        # Counters have no dimensions.
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.ndim:
            return _copy(value)
        return _copy(value) if value.dtype == to else cast_within_range(value, to)

    return _with_values(state, partial(rounded, to=dtype), partial(rounded, to=moments or dtype))


def _with_values(
    state: State, of_model: Callable[[object], object], of_moments: Callable[[object], object]
) -> State:
    return state | {
        "model": {name: of_model(value) for name, value in state["model"].items()},
        "moments": {
            name: {key: of_moments(value) for key, value in values.items()}
            for name, values in state["moments"].items()
        },
    }


def inject_state(trainer: Trainer, state: Mapping[str, Any], torch_device: str) -> list[StateValue]:
    """Inject `state` into a trainer by its own `load_state_dict`, and then directly.

    Returns: values that its own method ignored, without generators that its state lacks.
    Raises: UsageError if it refuses the state.
    """
    own = trainer.state_dict()
    if absent := [name for name in _PARTS if not isinstance(own.get(name), Mapping)]:
        raise UsageError(
            f"state_dict() of {type(trainer).__name__} has no {', '.join(absent)}: a check injects"
            f" the reference's state by the names {', '.join(_PARTS)}"
        )
    wanted = dict(own) | {
        "model": {
            name: state["model"].get(plain_name(name), value)
            for name, value in own["model"].items()
        },
        "optimizer": {
            "state": _by_index(trainer, state["moments"]),
            "param_groups": trainer.optimizer.state_dict()["param_groups"],
        },
        # A reference on the host has no state for an accelerator's generator.
        "generators": {
            name: state["generators"].get(name, value)
            for name, value in generator_states(torch_device).items()
        },
    }
    try:
        trainer.load_state_dict(wanted)
    except (RuntimeError, ValueError, KeyError) as error:
        raise UsageError(
            f"load_state_dict of {type(trainer).__name__} refuses the reference's state:"
            f" {type(error).__name__}: {error}"
        ) from error
    kept = {name: value for name, value in state["generators"].items() if name in own["generators"]}
    expected = dict(state) | {"generators": kept}
    not_loaded = sorted(differences(expected, current_state(trainer, torch_device)))
    if any(value.part == "model" for value in not_loaded):
        for name, value in trainer.model.state_dict().items():
            if plain_name(name) in state["model"]:
                put(value, state["model"][plain_name(name)])
    if any(value.part == "moments" for value in not_loaded):
        _force_moments(trainer, state["moments"])
    restore_generators(state["generators"], torch_device)
    return not_loaded


def differing_parameters(state: Mapping[str, Any], model: nn.Module) -> list[str]:
    """List parameters and buffers that differ from `state`, in the narrower of their dtypes."""
    actual = {plain_name(name): value for name, value in model.state_dict().items()}
    expected = state["model"]
    return sorted(
        name
        for name in expected.keys() | actual.keys()
        if name not in expected
        or name not in actual
        or not _rounds_to(whole(actual[name]), expected[name])
    )


def measure_changes(
    state: Mapping[str, Any], model: nn.Module, names: Sequence[str], dtype: torch.dtype
) -> SetupChanges:
    """Measure how much the parameters and buffers `names` of `model` differ from those of `state`.

    dtype: to which either side may have been rounded.
    """
    actual = {plain_name(name): value for name, value in model.state_dict().items()}
    expected, changes = state["model"], SetupChanges()
    for name in names:
        value = whole(actual[name]).detach().cpu() if name in actual else None
        if value is None or name not in expected or value.shape != expected[name].shape:
            changes.replaced.append(name)
            continue
        wanted = cast_within_range(expected[name].cpu(), value.dtype)
        found = measure_difference(name, value, wanted, coarser_dtype(value.dtype, dtype))
        changes.weights += [found] if found is not None else []
    return changes


def unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that `state_dict` leaves out, such as rotary frequencies, by their names in the unwrapped model."""
    saved = {plain_name(name) for name in model.state_dict()}
    found = {plain_name(name): value.detach() for name, value in model.named_buffers()}
    return {name: value for name, value in found.items() if name not in saved}


# Eight units in the last place of float32: a power and a division on an accelerator err by up to four.
_TABLE_ROUNDING = 1e-6


def measure_buffers(
    loaded: Mapping[str, Tensor], model: nn.Module, dtype: torch.dtype
) -> SetupChanges:
    """Measure how much the unsaved buffers of `model` differ from those `loaded` in this process.

    A wider dtype is not a change, nor is the rounding of a device on which a trainer computes them.
    """
    changes = SetupChanges()
    for name, value in unsaved_buffers(model).items():
        expected = loaded.get(name, value)
        if value.dtype.itemsize > expected.dtype.itemsize:
            continue
        if (value.shape, value.dtype) != (expected.shape, expected.dtype):
            changes.replaced.append(name)
            continue
        actual, is_number = value.cpu(), value.is_floating_point() or value.is_complex()
        if is_number and torch.allclose(actual, expected, _TABLE_ROUNDING, 0.0, equal_nan=True):
            continue
        found = measure_difference(name, actual, expected, coarser_dtype(value.dtype, dtype))
        changes.weights += [found] if found is not None else []
    return changes


def same_values(actual: Tensor, expected: Tensor) -> bool:
    """Return True if `actual` equals `expected` rounded to its dtype."""
    if actual.shape != expected.shape:
        return False
    return torch.equal(actual.detach().cpu(), cast_within_range(expected.cpu(), actual.dtype))


def _rounds_to(actual: Tensor, expected: Tensor) -> bool:
    """Return True if both are equal in the narrower of their dtypes."""
    is_wider = actual.dtype.itemsize > expected.dtype.itemsize
    value = cast_within_range(actual.detach(), expected.dtype) if is_wider else actual
    return same_values(value, expected)


def shared_parameters(model: nn.Module) -> list[list[str]]:
    """List groups of names of one parameter, such as tied embeddings."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(plain_name(name))
    return sorted(sorted(names) for names in groups.values() if len(names) > 1)


def differences(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> set[StateValue]:
    """Find parameters, moments and generators of `expected` that differ or are missing in `actual`."""
    wrong = {
        StateValue(f"model.{name}", "model", unwrapped_path(name))
        for name, value in expected["model"].items()
        if name not in actual["model"] or not same_values(actual["model"][name], value)
    }
    for name, values in expected["moments"].items():
        own = actual["moments"].get(name, {})
        wrong |= {
            StateValue(f"moments.{name}.{key}", "moments")
            for key, value in values.items()
            if key not in own or not same_values(torch.as_tensor(own[key]), torch.as_tensor(value))
        }
    generators = fingerprint(actual["generators"])
    return wrong | {
        StateValue(f"generators.{path}", "generators")
        for path, value in fingerprint(expected["generators"]).items()
        if generators.get(path) != value
    }


def _force_moments(trainer: Trainer, moments: Mapping[str, Any]) -> None:
    names = _names_by_id(trainer.model)
    for group in trainer.optimizer.param_groups:
        for parameter in group["params"]:
            wanted = moments.get(names.get(id(parameter), ""))
            if wanted is not None:
                trainer.optimizer.state[parameter] = {
                    key: moment_like(value, parameter) for key, value in wanted.items()
                }


def _by_index(trainer: Trainer, moments: Mapping[str, Any]) -> dict[int, Any]:
    """Return moments by number of the parameter, as in the state of torch's optimizers."""
    names = _names_by_id(trainer.model)
    parameters = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    return {
        number: {key: _copy(value) for key, value in moments[names[id(parameter)]].items()}
        for number, parameter in enumerate(parameters)
        if names.get(id(parameter)) in moments
    }


def _names_by_id(model: nn.Module) -> dict[int, str]:
    return {id(item.tensor): item.name for item in named_parameters(model)}


def _on_host(value: object) -> object:
    return whole(value.detach()).cpu() if isinstance(value, Tensor) else value


def _copy(value: object) -> object:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def hash_held_parts(trainer: Trainer) -> dict[HeldPart, str]:
    """Hash this rank's part of every parameter and of its optimizer moments."""
    held = {}
    for item in named_parameters(trainer.model):
        values = {None: item.tensor.detach(), **trainer.optimizer.state.get(item.tensor, {})}
        for moment, value in values.items():
            if isinstance(value, Tensor):
                part = HeldPart(item.name, moment, coordinates_of(value))
                held[part] = hash_value(local_part(value))
    return held


def trajectory_of(model: nn.Module, end: State) -> list[TrajectoryRecord]:
    """Measure the distance of each trained parameter of `model` from the end of the recorded steps.

    Distances are medians over elements: an optimizer that divides by the size of a gradient turns the
    rounding of near-zero gradients into whole updates. A collective on several ranks.
    """
    trained = set(end["trainable"])
    return [
        TrajectoryRecord(
            parameter=item.name,
            error=_median(value.to(torch.float64, copy=True).sub_(end["model"][item.name]).abs_()),
            size=_median(end["model"][item.name].abs()),
        )
        for item in named_parameters(model)
        if item.name in trained
        for value in (whole(item.tensor.detach()).cpu(),)
    ]


def _median(values: Tensor) -> float:
    # torch.median would treat a NaN among finite values as the largest.
    is_finite = math.isfinite(values.sum(dtype=torch.float64))
    return float(values.median()) if is_finite else math.nan


# Parameters with this many dims are stacked: the first dim counts experts.
_STACKED = 3


class Untouched:
    """Collects the parameters over the steps of a run. Call `add` after each, with gradients in place."""

    def __init__(self) -> None:
        # By name; a flag for each expert of a stacked parameter, else a single flag.
        self._reached: dict[str, Tensor] = {}

    def add(self, model: nn.Module) -> None:
        """Take the gradients of one step."""
        for item in named_parameters(model):
            if item.tensor.requires_grad:
                reached = _reached(item.tensor)
                self._reached[item.name] = reached | self._reached.get(item.name, reached)

    @property
    def names(self) -> list[str]:
        """Parameters without gradient; stacked ones by expert: `experts.down_proj.3`."""
        return [
            name if reached.ndim == 0 else f"{name}.{index}"
            for name, reached in self._reached.items()
            for index in (~reached.reshape(-1)).nonzero()[:, 0].tolist()
        ]


def _reached(parameter: Tensor) -> Tensor:
    """Return True for a nonzero gradient, by expert for a stacked parameter."""
    stacked = parameter.ndim >= _STACKED
    if parameter.grad is None:
        return torch.zeros(parameter.shape[:1] if stacked else (), dtype=torch.bool)
    nonzero = (parameter.grad != 0).cpu()
    return nonzero.flatten(1).any(1) if stacked else nonzero.any()


# Two elements that were both updated in float32 both fit 16 bits by chance once in 2**32.
_FEWEST_ELEMENTS = 2


def find_kept_narrow(trainer: Trainer) -> KeptPrecision:
    """Find trained parameters and moments narrower than float32."""
    found = KeptPrecision()
    held = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    for item in named_parameters(trainer.model):
        if not item.tensor.requires_grad:
            continue
        moments = trainer.optimizer.state.get(item.tensor, {})
        if _is_narrow(item.tensor):
            candidates = [*moments.values(), *held]
            copied = any(_is_copy(value, item.tensor) for value in candidates)
            (found.copied if copied else found.parameters).append(item.name)
        found.moments.extend(
            f"{item.name} {name}"
            for name, value in moments.items()
            if isinstance(value, Tensor) and value.ndim and _is_narrow(value)
        )
    return found


@contextmanager
def rounded_weights(
    trainer: Trainer, start: Mapping[str, Tensor], dtype: torch.dtype
) -> Iterator[list[str]]:
    """Yield a list of the wide parameters that the latest optimizer step found rounded to `dtype`.

    An updated weight kept in float32 does not fit a narrower dtype. If all changed elements of a
    parameter do, something rounded them. A collective on several ranks.

    start: parameters before training.
    """
    rounded: list[str] = []

    def look(*_arguments: object) -> None:
        rounded[:] = [
            item.name
            for item in named_parameters(trainer.model)
            if item.tensor.requires_grad
            and not _is_narrow(item.tensor)
            and item.name in start
            and _is_rounded(whole(item.tensor.detach()).cpu(), start[item.name], dtype)
        ]

    handle = trainer.optimizer.register_step_pre_hook(look)
    try:
        yield rounded
    finally:
        handle.remove()


def fits(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask of the elements that are exact in `dtype`."""
    return value.to(dtype).to(value.dtype) == value


def _is_rounded(value: Tensor, start: Tensor, dtype: torch.dtype) -> bool:
    changed = value[value != start.cpu().to(value.dtype)]
    return changed.numel() >= _FEWEST_ELEMENTS and bool(fits(changed, dtype).all())


def _is_copy(value: object, parameter: Tensor) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point() or _is_narrow(value):
        return False
    wide, narrow = local_part(value.detach()), local_part(parameter.detach())
    return wide.shape == narrow.shape and torch.equal(wide.to(narrow.device, narrow.dtype), narrow)


def _is_narrow(value: Tensor) -> bool:
    return value.is_floating_point() and value.dtype.itemsize < torch.float32.itemsize
