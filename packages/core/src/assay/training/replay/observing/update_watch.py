"""What a step changes: the trained parameters and their moments, and nothing else."""

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
from assay.training.state.parameters import NamedParameter, named_parameters, untrained_values
from assay.training.state.sharding import local_part, whole


@dataclass(frozen=True, slots=True)
class _SteppedParameter:
    """A parameter as the optimizer's step left it: a whole copy, and a hash of each moment."""

    item: NamedParameter
    value: Tensor
    moments: Mapping[str, str]


@dataclass(slots=True)
class MovedElements:
    """Elements that the reference's updates change, and how many of them updates here change too."""

    num_expected: int = 0
    num_moved: int = 0

    def add(self, actual: Tensor, expected: Tensor) -> None:
        """Count one update."""
        changes = expected != 0
        self.num_expected += int(changes.sum())
        self.num_moved += int((changes & (actual.to(expected.device) != 0)).sum())


@dataclass
class UpdateWatch:
    """Shows a handler what a trainer's step changes.

    `begin_step` comes before the step, `observe_updates` when the optimizer's part of it is done,
    `end_step` after the step.

    untrained: buffers and frozen parameters, of which as many must change as in the reference; None
        for all.
    """

    trainer: Trainer
    handler: StepValueHandler
    untrained: frozenset[str] | None = None
    moved: MovedElements = field(default_factory=MovedElements)
    _before: dict[str, Tensor] = field(default_factory=dict)
    _untrained_before: dict[str, str] = field(default_factory=dict)
    _after: list[_SteppedParameter] = field(default_factory=list)

    def trained(self) -> list[NamedParameter]:
        """The parameters that are trained now."""
        return [item for item in named_parameters(self.trainer.model) if item.tensor.requires_grad]

    def begin_step(self) -> None:
        """Keep what the step starts from."""
        with suspended_modes():
            self._before = {item.name: _copy(item.tensor) for item in self.trained()}
            self._untrained_before = self._hash_untrained()

    def observe_updates(self, parameters: list[NamedParameter]) -> None:
        """Show the change of each of `parameters` since the step began, and its moments."""
        with suspended_modes():
            if self._is_kept_by_some_ranks_only(parameters):
                self.trainer.optimizer.state.clear()
            self._after = [
                _SteppedParameter(item, _copy(item.tensor), self._hash_moments(item.tensor))
                for item in parameters
            ]
            for stepped in self._after:
                item = stepped.item
                # From the start of the step: whatever changes it on the way is in the update.
                update = stepped.value.double() - self._before[item.name].double()
                self.moved.add(
                    update, observe_update(self.handler, item, update, self._state_of(item.tensor))
                )

    def end_step(self) -> None:
        """Show what has changed since the optimizer's step, and what should not change at all."""
        with suspended_modes():
            for stepped in self._after:
                # Only the optimizer may change a trained parameter or its moments.
                tensor = stepped.item.tensor
                changed = torch.count_nonzero(whole(tensor.detach()) != stepped.value).cpu()
                changed += _num_unequal(stepped.moments, self._hash_moments(tensor))
                self.handler.observe(
                    address_of(stepped.item, "optimizer", "changed-later"), changed.reshape(1)
                )
            address = ValueAddress(Stage("", "optimizer"), "changed-untrained")
            num_changed = _num_unequal(self._untrained_before, self._hash_untrained())
            self.handler.observe(address, torch.tensor([num_changed]))
        self._after.clear()
        self._before.clear()

    def _is_kept_by_some_ranks_only(self, parameters: list[NamedParameter]) -> bool:
        """Whether a rank has no moments of what it trains, and another has.

        It was stepped by itself: to put moments together, here or before the next step, would hang.
        Then none count, and each is missed by its name.
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

    def _hash_moments(self, parameter: Tensor) -> dict[str, str]:
        kept = self._state_of(parameter)
        return fingerprint({name: _local(value) for name, value in kept.items()})

    def _hash_untrained(self) -> dict[str, str]:
        """Of what the reference does not train: counters of a trainer's own may count."""
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
    """Show the update of one parameter and what the optimizer keeps for it.

    Returns: the reference's update.
    """
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
