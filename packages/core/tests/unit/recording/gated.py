"""A small model with operations in its own code, and a tracer on it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from assay.hooks.module_tracer import ModuleTracer, NullHandler


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8, bias=False)
        self.act = nn.SiLU()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.act(self.up(x)) * 2.0)


@contextmanager
def watching(model: nn.Module) -> Iterator[ModuleTracer]:
    tracer = ModuleTracer(NullHandler())
    with tracer.attached(model), torch.no_grad():
        yield tracer
