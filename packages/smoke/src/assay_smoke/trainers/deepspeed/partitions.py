"""Assembles and changes values that ZeRO divides over ranks.

DeepSpeed lays the trained parameters end to end in float32 and gives each rank a part, here called
its *flat* tensors. A rank holds all, a piece or nothing of a parameter. Clipped gradients and the
moments of Adam are divided the same way. Functions that read a whole value are collectives.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

# The key of the step count in a state of Adam.
COUNT = "step"


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one parameter that a rank holds. Positions and sizes are in elements."""

    flat: Tensor
    """Tensor that the optimizer of this rank updates, float32."""
    start: int
    """Start of the piece in `flat`."""
    offset: int
    """Start of the piece in the parameter."""
    size: int

    def of(self, like_flat: Tensor) -> Tensor:
        """Return a view (size,) of the piece in a tensor with the layout of `flat`."""
        return like_flat.detach().view(-1).narrow(0, self.start, self.size)


# Selects a tensor with the layout of the piece's flat tensor, if there is one.
Held = Callable[[Piece], Tensor | None]


class Partitions(ABC):
    """The state that a DeepSpeed engine keeps of each trained parameter, in any ZeRO stage."""

    groups: ClassVar[str]
    """Attribute of DeepSpeed's optimizer with the parameters of each group."""
    parameters: list[nn.Parameter]
    """Parameters that DeepSpeed's optimizer holds, in the order of the model."""

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 - of DeepSpeed
        self._engine, self._optimizer = engine, engine.optimizer
        held = {id(p) for group in getattr(self._optimizer, self.groups) for p in group}
        self.parameters = [p for p in engine.module.parameters() if id(p) in held]

    @abstractmethod
    def piece(self, parameter: nn.Parameter) -> Piece | None:
        """Return the part of `parameter` that this rank holds, or None."""

    @abstractmethod
    def set_gradient(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Replace the summed gradient that DeepSpeed clips next."""

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return the whole gradient, summed over micro-batches and ranks, float32."""
        from deepspeed.utils import safe_get_full_grad

        gradient: Tensor = safe_get_full_grad(parameter)
        return gradient.float()

    def flats(self) -> list[Tensor]:
        """Return all tensors that the optimizer of this rank updates."""
        return [p for group in self._engine.basic_optimizer.param_groups for p in group["params"]]

    def grad_norm(self) -> float:
        """Return the norm by which DeepSpeed clipped, without the loss scale."""
        return float(self._optimizer._global_grad_norm)  # noqa: SLF001

    def refresh_masters(self) -> None:
        """Recompute every float32 copy from its parameter, as DeepSpeed does after loading a model."""
        self._optimizer.refresh_fp32_params()

    def has_moments(self) -> bool:
        """Return whether moments exist. They exist for all parameters and ranks or for none."""
        return bool(self._engine.basic_optimizer.state.get(self.flats()[0]))

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the moments and the step count of `parameter`, empty before the first step."""
        states = self._engine.basic_optimizer.state
        piece = self.piece(parameter)
        # Every part has the same count and names, so a rank without a piece reads its first part.
        kept = states.get(self.flats()[0] if piece is None else piece.flat)
        if not kept:
            return {}
        names = [name for name in kept if name != COUNT]  # in the order of all ranks
        moments = {name: self.read(parameter, _moment(states, name)) for name in names}
        return {COUNT: torch.tensor(float(kept[COUNT]))} | moments

    def set_moments(self, moments: Sequence[Mapping[str, Any]]) -> None:
        """Replace all moments: one state per parameter, empty for a parameter without a step."""
        states = self._engine.basic_optimizer.state
        count = max((float(one[COUNT]) for one in moments if COUNT in one), default=0.0)
        is_torchs = isinstance(self._engine.basic_optimizer, torch.optim.AdamW)
        for flat in self.flats():
            zeros = {name: torch.zeros_like(flat.detach()) for name in ("exp_avg", "exp_avg_sq")}
            states[flat] = {COUNT: torch.tensor(count) if is_torchs else int(count)} | zeros
        for parameter, values in zip(self.parameters, moments, strict=True):
            for name, value in values.items():
                if name != COUNT:
                    self.write(parameter, value, _moment(states, name))
        self._relink()

    def _relink(self) -> None:  # noqa: B027 - only Zero12 keeps views
        """Renew the views of the moments that DeepSpeed keeps."""

    def read(self, parameter: nn.Parameter, held: Held) -> Tensor:
        """Assemble a value of `parameter` from all ranks: float32, in its shape."""
        total = torch.zeros(whole_size(parameter), dtype=torch.float32, device=parameter.device)
        piece = self.piece(parameter)
        if piece is not None and (like_flat := held(piece)) is not None:
            total[piece.offset : piece.offset + piece.size] = piece.of(like_flat)
        if dist.get_world_size() > 1:
            dist.all_reduce(total)  # all other ranks have zero there
        shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
        return total.view(shape)

    def write(self, parameter: nn.Parameter, value: Tensor, held: Held) -> None:
        """Write this rank's part of a value of `parameter`."""
        piece = self.piece(parameter)
        if piece is not None and (like_flat := held(piece)) is not None:
            own = value.detach().reshape(-1)[piece.offset : piece.offset + piece.size]
            piece.of(like_flat).copy_(own)


class Zero12(Partitions):
    """ZeRO-1 and ZeRO-2: every rank holds whole parameters."""

    groups = "bit16_groups"

    def piece(self, parameter: nn.Parameter) -> Piece | None:
        """Look the piece up in DeepSpeed's mapping."""
        mapping = parameter._hp_mapping  # type: ignore[attr-defined] # noqa: SLF001
        if mapping is None:
            return None
        inner, outer = mapping.hp_fragment_address, mapping.lp_fragment_address
        flat = self.flats()[mapping.param_group_index]
        return Piece(flat, inner.start, outer.start, inner.numel)

    def set_gradient(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Replace the gradient by DeepSpeed's own function."""
        from deepspeed.utils import safe_set_full_grad

        safe_set_full_grad(parameter, value)
        piece = self.piece(parameter)
        if self._optimizer.cpu_offload and piece is not None and piece.flat.grad is not None:
            # DeepSpeed clips by norms that it measured when the gradients left the device.
            number = self._optimizer.get_param_id(parameter)
            norm = piece.of(piece.flat.grad).double().norm(2)
            self._optimizer.norm_for_param_grads[number] = norm

    def _relink(self) -> None:
        self._optimizer._hp_optimizer_states_linked = False  # noqa: SLF001
        self._optimizer._lazy_init_hp_params_optimizer_state()  # noqa: SLF001


class Zero1InFloat32(Zero12):
    """ZeRO-1 of bfloat16 with gradients summed in float32: DeepSpeed's BF16_Optimizer."""

    groups = "bf16_groups"

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return the whole sums, which every rank holds."""
        sums: Tensor = parameter._hp_grad  # type: ignore[attr-defined] # noqa: SLF001
        return sums.detach().float().view(parameter.shape).clone()

    def set_gradient(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Replace the whole sums. This rank's part is a view of them."""
        sums: Tensor = parameter._hp_grad  # type: ignore[attr-defined] # noqa: SLF001
        sums.copy_(value.view(sums.shape))


class Zero3(Partitions):
    """ZeRO-3: each parameter is divided over all ranks too."""

    groups = "fp16_groups"

    def flats(self) -> list[Tensor]:
        """Return all tensors that this rank updates. The optimizer gets them only in its step."""
        return list(self._optimizer.fp32_partitioned_groups_flat)

    def piece(self, parameter: nn.Parameter) -> Piece | None:
        """Compute the piece. Parts are equal, in the order of the ranks, and padded at the end."""
        number = self._optimizer.get_param_id(parameter)
        group, start, size = self._optimizer.grad_position[number]
        offset = dist.get_rank() * size
        size = min(size, whole_size(parameter) - offset)
        return Piece(self.flats()[group], start, offset, size) if size > 0 else None

    def set_gradient(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Replace this rank's part by DeepSpeed's own function."""
        from deepspeed.utils import safe_set_local_grad

        size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        padded = value.new_zeros(size * dist.get_world_size())
        padded[: value.numel()] = value.reshape(-1)
        safe_set_local_grad(parameter, padded[dist.get_rank() * size :][:size])


def partitions_of(engine: Any, stage: int) -> Partitions:  # noqa: ANN401 - of DeepSpeed
    """Return the partitions of `engine`. stage: of ZeRO, 1 to 3."""
    if stage == 3:
        return Zero3(engine)
    return Zero1InFloat32(engine) if hasattr(engine.optimizer, "bf16_groups") else Zero12(engine)


def whole_size(parameter: nn.Parameter) -> int:
    """Count the elements of the whole parameter. This rank may hold none of them."""
    size: int = getattr(parameter, "ds_numel", parameter.numel())
    return size


def master(piece: Piece) -> Tensor:
    """Select the float32 copies, from which the parameters are rounded."""
    return piece.flat


def clipped_gradient(piece: Piece) -> Tensor | None:
    """Select the gradients that the optimizer is about to use."""
    return piece.flat.grad


def _moment(states: Mapping[Tensor, Mapping[str, Tensor]], name: str) -> Held:
    return lambda piece: states[piece.flat][name]


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
            value = kept.pop(MASTER, None)
            if value is not None:
                partitions.write(parameter, value, master)
        partitions.set_moments(values)

    def _of(self, parameter: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = dict(self._partitions.moments(parameter))
        if _has_master(parameter):
            state[MASTER] = self._partitions.read(parameter, master)
        return state


def _has_master(parameter: Tensor) -> bool:
    return parameter.dtype != torch.float32
