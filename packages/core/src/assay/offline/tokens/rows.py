"""Selection of the rows of single tokens from a tensor of any layout.

Shape legend: B batch rows, T tokens of a pass, R selected tokens, H heads, C channels.
"""

import torch
from torch import Tensor

from assay.offline.tokens.passes import Pass


def take_rows(value: Tensor, of_pass: Pass, rows: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Return the rows of some tokens, (R, 1, C), and which of them the tensor holds, (R,) bool.

    value: (B, T, ...), (B, H, T, C), (B * T, ...), (1, T, ...); with the last tokens only (B, 1, ...) or, in
        caches of sliding windows, (B, H, S, C).
    rows: flat numbers b * T + t of the tokens, (R,).
    Returns: None for a tensor without tokens, or if the tokens are unknown.
    """
    if rows is None or of_pass.shape is None:
        return None
    batch, length = of_pass.shape
    held = torch.ones(len(rows), dtype=torch.bool)
    if value.shape[:2] == (batch, length):
        flat = value.flatten(0, 1)
    elif value.ndim == 4 and value.shape[0] == batch and value.shape[2] == length:
        flat = value.transpose(1, 2).flatten(0, 1)
    elif value.shape[:1] == (batch * length,):
        flat = value
    elif value.shape[:2] == (1, length):
        flat, rows = value[0], rows % length
    elif value.shape[:2] == (batch, 1):
        held = rows % length == length - 1
        flat, rows = value[:, 0], rows // length
    elif value.ndim == 4 and value.shape[0] == batch and 0 < value.shape[2] < length:
        num_last = value.shape[2]
        place = rows % length - (length - num_last)
        held = place >= 0
        flat = value.transpose(1, 2).flatten(0, 1)
        rows = rows // length * num_last + place.clamp(min=0)
    else:
        return None
    return flat[rows].reshape(len(rows), 1, -1), held
