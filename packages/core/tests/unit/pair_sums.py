"""Sums over pairs of small tensors."""

import torch
from torch import Tensor

from assay.metrics import PairSums


def sums_of(
    actual: Tensor,
    expected: Tensor,
    prompts: list[int] | None = None,
    start: int = 0,
    *,
    pointwise: bool = False,
) -> PairSums:
    rows = len(actual)
    prompt = torch.tensor(prompts) if prompts is not None else torch.zeros(rows, dtype=torch.long)
    sums = PairSums(pointwise=pointwise)
    sums.add(actual, expected, prompt, torch.arange(start, start + rows))
    return sums


def matrix(*rows: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(rows, dtype=dtype)
