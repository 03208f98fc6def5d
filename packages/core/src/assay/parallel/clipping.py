"""The global norm of plain and DTensor gradients, and clipping by it."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

# As in torch.nn.utils.clip_grad_norm_.
_EPSILON = 1e-6


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Compute the Euclidean norm of the whole gradients, the same on all ranks.

    Plain gradients are the same on all ranks and count once; DTensors may have different meshes.
    Sums are in float32; in float64 for float64 gradients.
    Returns: a plain scalar; 0 without gradients; nan if one holds a NaN.
    """
    plain: list[Tensor] = []
    divided: dict[object, tuple[DTensor, list[Tensor]]] = {}
    for gradient in gradients:
        if not isinstance(gradient, DTensor):
            plain.append(_sum_of_squares(gradient))
            continue
        whole = gradient.redistribute(
            placements=[Replicate() if p.is_partial() else p for p in gradient.placements]
        )
        key = (whole.device_mesh, whole.placements)
        _, sums = divided.setdefault(key, (whole, []))
        sums.append(_sum_of_squares(whole.to_local()))
    for of_mesh, sums in divided.values():
        placements = [p if p.is_replicate() else Partial() for p in of_mesh.placements]
        local = torch.stack(sums).sum()
        plain.append(
            DTensor.from_local(
                local, of_mesh.device_mesh, placements, run_check=False
            ).full_tensor()
        )
    return torch.stack(plain).sum().sqrt() if plain else torch.tensor(0.0)


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients of `parameters` so that their global norm is at most `max_norm`.

    Returns: the norm before scaling, as `gradient_norm`.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = gradient_norm(gradients)
    scale = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    for gradient in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.mul_(scale.to(local.device, local.dtype))
    return norm


def _sum_of_squares(local: Tensor) -> Tensor:
    wide = local.detach()
    wide = wide if wide.dtype == torch.float64 else wide.float()
    return wide.square().sum()
