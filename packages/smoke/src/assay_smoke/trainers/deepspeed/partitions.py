"""Values that ZeRO divides over ranks, put together and taken apart again.

DeepSpeed lays the trained parameters end to end, in float32, and gives each rank a part of that, here
its *flat* tensors: of a parameter a rank then has all, a piece, or nothing. Gradients that are clipped
and the moments of Adam are divided alike. What gives or takes a whole value is a collective.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

# The count of steps in a state of Adam, beside its moments.
COUNT = "step"


@dataclass(frozen=True, slots=True)
class Piece:
    """What a rank has of one parameter.

    flat: what the optimizer of this rank changes, float32.
    start: of the piece in `flat`; offset: of the piece in the parameter; size: all in elements.
    """

    flat: Tensor
    start: int
    offset: int
    size: int

    def of(self, like_flat: Tensor) -> Tensor:
        """The piece of a tensor that is laid out as `flat` is: a view, (size,)."""
        return like_flat.detach().view(-1).narrow(0, self.start, self.size)


class Partitions(ABC):
    """What a DeepSpeed engine keeps of each trained parameter, whatever its ZeRO stage.

    groups: name of the list of parameters that DeepSpeed's optimizer has for each of its groups.
    divided: whether ranks have different pieces.
    parameters: those that DeepSpeed's optimizer holds, in the order of the model.
    """

    groups: ClassVar[str]
    divided: ClassVar[bool] = True

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 - of DeepSpeed
        self._engine, self._optimizer = engine, engine.optimizer
        held = {id(parameter) for group in self._held_groups() for parameter in group}
        self.parameters: list[nn.Parameter] = [
            parameter for parameter in engine.module.parameters() if id(parameter) in held
        ]
        # DeepSpeed may have made steps already, as it does without ZeRO to have moments.
        states = engine.basic_optimizer.state.values()
        self._first_count = max((float(state[COUNT]) for state in states), default=0.0)

    def _held_groups(self) -> Sequence[Sequence[nn.Parameter]]:
        groups: Sequence[Sequence[nn.Parameter]] = getattr(self._optimizer, self.groups)
        return groups

    @abstractmethod
    def piece(self, parameter: nn.Parameter) -> Piece | None:
        """What this rank has of `parameter`; None if nothing."""

    @abstractmethod
    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """The whole gradient of `parameter`, added up over micro-batches and ranks, float32."""

    @abstractmethod
    def set_gradient(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Change the sums that DeepSpeed clips next."""

    def flats(self) -> list[Tensor]:
        """All that this rank's optimizer changes."""
        return [p for group in self._engine.basic_optimizer.param_groups for p in group["params"]]

    def grad_norm(self) -> float:
        """The norm that DeepSpeed has clipped by, without a loss scale."""
        return float(self._optimizer._global_grad_norm)  # noqa: SLF001

    # The float32 copy of each parameter, from which the parameter itself is rounded.

    def master(self, parameter: nn.Parameter) -> Tensor:
        """The whole float32 copy of `parameter`."""
        piece = self.piece(parameter)
        return self._whole(parameter, piece, None if piece is None else piece.flat)

    def set_master(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Change this rank's part of the float32 copy."""
        piece = self.piece(parameter)
        if piece is not None:
            _put(piece, piece.flat, value)

    def refresh_masters(self) -> None:
        """Make every float32 copy anew from its parameter, as DeepSpeed does after loading a model."""
        self._optimizer.refresh_fp32_params()

    # Gradients between clipping and the optimizer.

    def clipped_gradient(self, parameter: nn.Parameter) -> Tensor:
        """The whole gradient of `parameter` as the optimizer is about to use it, float32."""
        piece = self.piece(parameter)
        return self._whole(parameter, piece, None if piece is None else piece.flat.grad)

    def set_clipped_gradient(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Change what the optimizer is about to use."""
        piece = self.piece(parameter)
        if piece is not None and piece.flat.grad is not None:
            _put(piece, piece.flat.grad, value)

    # What Adam keeps.

    def has_moments(self) -> bool:
        """Whether there are any: of all parameters, on all ranks."""
        return bool(self._engine.basic_optimizer.state.get(self.flats()[0]))

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The moments and the count of steps of `parameter`; empty before the first step."""
        states = self._engine.basic_optimizer.state
        piece = self.piece(parameter)
        # All parts have one count and the same names: also of a rank without a piece.
        kept = states.get(self.flats()[0] if piece is None else piece.flat)
        if not kept:
            return {}
        moments = {
            name: self._whole(parameter, piece, value)
            for name, value in kept.items()
            if name != COUNT
        }
        return {COUNT: torch.tensor(float(kept[COUNT]))} | moments

    def set_moments(self, moments: Sequence[Mapping[str, Any]]) -> None:
        """Replace all: one state for each of `parameters`, empty for one without a step.

        If all are empty, moments and count are those with which DeepSpeed begins.
        """
        states = self._engine.basic_optimizer.state
        counts = [float(values[COUNT]) for values in moments if COUNT in values]
        count = max(counts, default=self._first_count)
        for flat in self.flats():
            states[flat] = {
                COUNT: self._as_counted(count),
                "exp_avg": torch.zeros_like(flat.detach()),
                "exp_avg_sq": torch.zeros_like(flat.detach()),
            }
        for parameter, values in zip(self.parameters, moments, strict=True):
            piece = self.piece(parameter)
            for name, value in values.items():
                if piece is not None and name != COUNT:
                    _put(piece, states[piece.flat][name], value)
        self._relink()

    def _relink(self) -> None:  # noqa: B027 - most keep no views
        """Have DeepSpeed look for the moments anew, where it keeps views of them."""

    def _as_counted(self, count: float) -> Tensor | int:
        """A count of steps, as the optimizer keeps it."""
        is_torchs = isinstance(self._engine.basic_optimizer, torch.optim.AdamW)
        return torch.tensor(count) if is_torchs else int(count)

    def _whole(
        self, parameter: nn.Parameter, piece: Piece | None, like_flat: Tensor | None
    ) -> Tensor:
        """What the ranks have of a value of `parameter`, put together: float32, of its shape.

        like_flat: a tensor that is laid out as the piece's flat one; None where there is none.
        """
        total = torch.zeros(whole_size(parameter), dtype=torch.float32, device=parameter.device)
        if piece is not None and like_flat is not None:
            total[piece.offset : piece.offset + piece.size] = piece.of(like_flat)
        if self.divided and dist.get_world_size() > 1:
            dist.all_reduce(total)  # all other ranks have zero there
        return total.view(whole_shape(parameter))


class Replicated(Partitions):
    """Without ZeRO: every rank has all of everything. In float32 the parameters are trained as they are."""

    groups = "fp16_groups"
    divided = False

    def _held_groups(self) -> Sequence[Sequence[nn.Parameter]]:
        if self._trains_parameters:
            return [group["params"] for group in self._optimizer.param_groups]
        return super()._held_groups()

    @property
    def _trains_parameters(self) -> bool:
        """Whether there is no float32 copy."""
        return self._optimizer is self._engine.basic_optimizer

    def piece(self, parameter: nn.Parameter) -> Piece | None:
        """All of it."""
        if self._trains_parameters:
            return Piece(parameter, 0, 0, parameter.numel())
        numbers = {
            id(p): n for n, p in enumerate(p for group in self._held_groups() for p in group)
        }
        return Piece(self.flats()[numbers[id(parameter)]], 0, 0, parameter.numel())

    def grad_norm(self) -> float:
        """The norm; in float32 DeepSpeed keeps none: nan."""
        return float("nan") if self._trains_parameters else super().grad_norm()

    def refresh_masters(self) -> None:
        """As above, where there are float32 copies."""
        if not self._trains_parameters:
            super().refresh_masters()

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """The gradient that autograd has added up, and DeepSpeed over ranks."""
        own = parameter.grad
        return torch.zeros_like(parameter, dtype=torch.float32) if own is None else own.float()

    def set_gradient(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Change it in place."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.copy_(value)


class Zero12(Partitions):
    """ZeRO-1 and ZeRO-2: parameters are whole."""

    groups = "bit16_groups"

    def piece(self, parameter: nn.Parameter) -> Piece | None:
        """Where DeepSpeed's mapping says."""
        mapping = parameter._hp_mapping  # type: ignore[attr-defined] # noqa: SLF001
        if mapping is None:
            return None
        inner, outer = mapping.hp_fragment_address, mapping.lp_fragment_address
        flat = self.flats()[mapping.param_group_index]
        return Piece(flat, inner.start, outer.start, inner.numel)

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """As DeepSpeed's own function puts it together."""
        from deepspeed.utils import safe_get_full_grad

        gradient: Tensor = safe_get_full_grad(parameter)
        return gradient.float()

    def set_gradient(self, parameter: nn.Parameter, value: Tensor) -> None:
        """As DeepSpeed's own function takes it apart."""
        from deepspeed.utils import safe_set_full_grad

        safe_set_full_grad(parameter, value)
        piece = self.piece(parameter)
        if self._optimizer.cpu_offload and piece is not None and piece.flat.grad is not None:
            # Measured as the gradient left the device, and read again when it is clipped.
            number = self._optimizer.get_param_id(parameter)
            norm = piece.of(piece.flat.grad).double().norm(2)
            self._optimizer.norm_for_param_grads[number] = norm

    def _relink(self) -> None:
        self._optimizer._hp_optimizer_states_linked = False  # noqa: SLF001
        self._optimizer._lazy_init_hp_params_optimizer_state()  # noqa: SLF001


class Zero1InFloat32(Zero12):
    """ZeRO-1 of bfloat16 whose gradients are added up in float32: DeepSpeed's BF16_Optimizer."""

    groups = "bf16_groups"

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """Every rank has whole sums beside its part of them."""
        sums: Tensor = parameter._hp_grad  # type: ignore[attr-defined] # noqa: SLF001
        return sums.detach().float().view(parameter.shape).clone()

    def set_gradient(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Change the whole sums, of which this rank's part is a view."""
        sums: Tensor = parameter._hp_grad  # type: ignore[attr-defined] # noqa: SLF001
        sums.copy_(value.view(sums.shape))


class Zero3(Partitions):
    """ZeRO-3: parameters are divided too, each of them over all ranks."""

    groups = "fp16_groups"

    def flats(self) -> list[Tensor]:
        """All that this rank's optimizer changes: it gets them only as it steps."""
        return list(self._optimizer.fp32_partitioned_groups_flat)

    def piece(self, parameter: nn.Parameter) -> Piece | None:
        """Equal parts in the order of the ranks; behind the last element there is padding."""
        number = self._optimizer.get_param_id(parameter)
        group, start, size = self._optimizer.grad_position[number]
        offset = dist.get_rank() * size
        size = min(size, whole_size(parameter) - offset)
        return Piece(self.flats()[group], start, offset, size) if size > 0 else None

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """As DeepSpeed's own function puts it together."""
        from deepspeed.utils import safe_get_full_grad

        gradient: Tensor = safe_get_full_grad(parameter)
        return gradient.float()

    def set_gradient(self, parameter: nn.Parameter, value: Tensor) -> None:
        """As DeepSpeed's own function takes a rank's part."""
        from deepspeed.utils import safe_set_local_grad

        size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        padded = value.new_zeros(size * dist.get_world_size())
        padded[: value.numel()] = value.reshape(-1)
        safe_set_local_grad(parameter, padded[dist.get_rank() * size :][:size])


def partitions_of(engine: Any, stage: int) -> Partitions:  # noqa: ANN401 - of DeepSpeed
    """What `engine` keeps, by the ZeRO `stage` of its configuration."""
    if stage == 0:
        return Replicated(engine)
    if stage == 3:
        return Zero3(engine)
    return Zero1InFloat32(engine) if hasattr(engine.optimizer, "bf16_groups") else Zero12(engine)


def whole_size(parameter: nn.Parameter) -> int:
    """Elements of all of `parameter`, of which this rank may hold none at the moment."""
    size: int = getattr(parameter, "ds_numel", parameter.numel())
    return size


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """The shape of all of `parameter`."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def _put(piece: Piece, like_flat: Tensor, value: Tensor) -> None:
    """Write this rank's part of the whole `value` into a tensor laid out as the flat one."""
    own = value.detach().reshape(-1)[piece.offset : piece.offset + piece.size]
    piece.of(like_flat).copy_(own)
