"""DeepSpeed's optimizer in the form of torch's: one state per parameter of the model."""

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from assay_smoke.trainers.deepspeed.partitions import Partitions

# Key of the float32 copy in a parameter's state.
MASTER = "master"


class PartitionedOptimizer(torch.optim.Optimizer):
    """A view of the optimizer of a DeepSpeed engine. The engine makes the steps.

    Reading its `state` reads DeepSpeed's partitions, which is a collective.
    """

    def __init__(self, partitions: Partitions, learning_rate: float) -> None:
        super().__init__(partitions.parameters, {"lr": learning_rate})
        self.state = PartitionedState(partitions)  # type: ignore[assignment]

    def step(self, closure: object = None) -> NoReturn:
        """Raise NotImplementedError, since DeepSpeed's engine makes the steps."""
        del closure
        raise NotImplementedError("DeepSpeed's engine makes the steps")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace moments, counts and float32 copies. Missing values are initialized."""
        self.state.replace(state_dict["state"])  # type: ignore[attr-defined]


class PartitionedState(MutableMapping[Tensor, dict[str, Any]]):
    """The moments, step count and float32 copy of each parameter."""

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions

    def __getitem__(self, parameter: Tensor) -> dict[str, Any]:
        if not any(parameter is held for held in self._partitions.parameters):
            raise KeyError(parameter)
        return self._of(parameter)  # type: ignore[arg-type]

    def __setitem__(self, parameter: Tensor, values: dict[str, Any]) -> None:
        numbers = {id(held): n for n, held in enumerate(self._partitions.parameters)}
        state = {n: self._of(held) for n, held in enumerate(self._partitions.parameters)}
        self.replace(state | {numbers[id(parameter)]: values})

    def __delitem__(self, parameter: Tensor) -> None:
        raise NotImplementedError(f"DeepSpeed keeps the state of {parameter.shape}")

    def __iter__(self) -> Iterator[Tensor]:
        stepped = self._partitions.has_moments()
        return iter([p for p in self._partitions.parameters if stepped or _has_master(p)])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def replace(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Replace all values. `state` is by number of the parameter.

        A parameter without a float32 copy in `state` gets one of its current value.
        """
        partitions = self._partitions
        values = [dict(state.get(n, {})) for n in range(len(partitions.parameters))]
        partitions.refresh_masters()
        for parameter, kept in zip(partitions.parameters, values, strict=True):
            master = kept.pop(MASTER, None)
            if master is not None:
                partitions.set_master(parameter, master)
        partitions.set_moments(values)

    def _of(self, parameter: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = dict(self._partitions.moments(parameter))
        if _has_master(parameter):
            state[MASTER] = self._partitions.master(parameter)
        return state


def _has_master(parameter: Tensor) -> bool:
    return parameter.dtype != torch.float32
