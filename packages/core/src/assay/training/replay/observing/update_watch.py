"""Watches the changes of a step: trained parameters and moments change, and nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from assay.hooks.suspension import suspended_modes
from assay.stages import Stage
from assay.training.protocol import Trainer
from assay.training.replay.stage_values import COUNT, StepValueHandler, ValueAddress, address_of
from assay.training.state.files import fingerprint
from assay.training.state.parameters import (
    NamedParameter,
    in_blocks,
    named_parameters,
    untrained_values,
)
from assay.training.state.sharding import local_part, whole


@dataclass(slots=True)
class MovedElements:
    """Counts of parameter elements that updates change."""

    num_expected: int = 0
    """Elements that the reference's updates change."""
    num_moved: int = 0
    """Those of them that updates here change too."""

    def add(self, actual: Tensor, expected: Tensor) -> None:
        """Count one update."""
        for own, other in in_blocks(actual.to(expected.device), expected):
            changes = other != 0
            self.num_expected += int(changes.count_nonzero())
            self.num_moved += int((changes & (own != 0)).count_nonzero())


@dataclass
class UpdateWatch:
    """Passes the changes of a trainer's step to a handler.

    Call `begin_step` before the step, `observe_updates` after the optimizer's part of it, and
    `end_step` after the step.
    """

    trainer: Trainer
    handler: StepValueHandler
    untrained: frozenset[str] | None = None
    """Buffers and frozen parameters that must change as in the reference; None for all."""
    moved: MovedElements = field(default_factory=MovedElements)
    _before: dict[str, Tensor] = field(default_factory=dict)
    _untrained_before: dict[str, str] = field(default_factory=dict)
    # Each parameter after the optimizer's step, with hashes of this rank's part of it and of each moment.
    _after: list[tuple[NamedParameter, dict[str, str]]] = field(default_factory=list)

    def trained(self) -> list[NamedParameter]:
        """List the parameters with `requires_grad`."""
        return [item for item in named_parameters(self.trainer.model) if item.tensor.requires_grad]

    def begin_step(self) -> None:
        """Copy the values before the step."""
        with suspended_modes():
            self._before = {item.name: _copy(item.tensor) for item in self.trained()}
            self._untrained_before = self._hash_untrained()

    def observe_updates(self, parameters: list[NamedParameter]) -> None:
        """Pass the change of each parameter since `begin_step`, and its moments, to the handler."""
        with suspended_modes():
            if self._lack_moments_on_some_ranks(parameters):
                self.trainer.optimizer.state.clear()
            self._after = [(item, self._hash_stepped(item.tensor)) for item in parameters]
            for item in parameters:
                # Since the start of the step, so that any earlier change counts as update.
                value = whole(item.tensor.detach())
                update = value.to(torch.float64, copy=True).sub_(self._before[item.name])
                expected = observe_update(self.handler, item, update, self._state_of(item.tensor))
                if expected is not update:
                    self.moved.add(update, expected)

    def end_step(self) -> None:
        """Pass later changes of parameters, and changes of untrained values, to the handler."""
        with suspended_modes():
            for item, hashes in self._after:
                # Only the optimizer may change a trained parameter or its moments.
                changed = _num_unequal(hashes, self._hash_stepped(item.tensor))
                address = address_of(item, "optimizer", "changed-later")
                self.handler.observe(address, torch.tensor([changed]))
            address = ValueAddress(Stage("", "optimizer"), "changed-untrained")
            num_changed = _num_unequal(self._untrained_before, self._hash_untrained())
            self.handler.observe(address, torch.tensor([num_changed]))
        self._after.clear()
        self._before.clear()

    def _lack_moments_on_some_ranks(self, parameters: list[NamedParameter]) -> bool:
        """Return True if some ranks lack moments of their parameters, and others have theirs.

        Gathering moments would then hang, here or before the next step. They are dropped, and each
        counts as missing.
        """
        if not dist.is_initialized():
            return False
        own = any(self._state_of(item.tensor) for item in parameters) if parameters else None
        of_ranks: list[bool | None] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, own)
        return {True, False} <= {*of_ranks}

    def _state_of(self, parameter: Tensor) -> Mapping[str, object]:
        state: Mapping[str, object] = self.trainer.optimizer.state.get(parameter, {})
        return state

    def _hash_stepped(self, parameter: Tensor) -> dict[str, str]:
        kept = {"": parameter.detach(), **self._state_of(parameter)}
        return fingerprint({name: _local(value) for name, value in kept.items()})

    def _hash_untrained(self) -> dict[str, str]:
        """Hash the values that the reference does not train; a trainer's own counters may change."""
        values = untrained_values(self.trainer.model)
        return fingerprint(
            {
                name: _local(value.detach())
                for name, value in values.items()
                if self.untrained is None or name in self.untrained
            }
        )


def observe_update(
    handler: StepValueHandler, item: NamedParameter, update: Tensor, moments: Mapping[str, object]
) -> Tensor:
    """Pass the update of one parameter and its moments to the handler; return the reference's update."""
    expected = handler.observe(address_of(item, "optimizer", "update"), update)
    for name, value in moments.items():
        if isinstance(value, Tensor) and value.ndim:
            handler.observe(address_of(item, "optimizer", name), whole(value))
        elif isinstance(value, Tensor | int | float):
            count = torch.tensor([round(float(value))])
            handler.observe(address_of(item, "optimizer", f"{COUNT}{name}"), count)
    return expected


def _copy(parameter: Tensor) -> Tensor:
    return whole(parameter.detach()).clone()


def _local(value: object) -> object:
    return local_part(value) if isinstance(value, Tensor) else value


def _num_unequal(before: Mapping[str, str], after: Mapping[str, str]) -> int:
    return sum(before.get(name) != after.get(name) for name in before.keys() | after.keys())
