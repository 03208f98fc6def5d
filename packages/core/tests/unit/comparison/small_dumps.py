"""Dumps of a small network in msprobe's layout, for tests of the whole comparison."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from assay.comparison.check import CompareOptions, compare
from assay.runs import SilentProgress
from assay.verdicts import Verdict
from packages.core.tests.dump_writers.msprobe import dumped

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.scale = 1.0

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = hidden + self.scale * self.down(self.up(hidden).relu())
        return result


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.lm_head = nn.Linear(WIDTH, 32, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.lm_head(hidden)
        return logits


Change = Callable[[Any], object]


def write(
    folder: Path, change: Change = lambda _: None, *, ids: Tensor | None = None,
    parameters: bool = False,
) -> Path:  # fmt: skip
    torch.manual_seed(1)
    network = Network()
    change(network)
    prompt = torch.arange(8).reshape(1, 8) if ids is None else ids
    with torch.no_grad(), dumped(network, folder, parameters=parameters):
        for tokens in (prompt, torch.tensor([[9]]), torch.tensor([[10]])):
            network(tokens)
    return folder


def judge(expected: Path, actual: Path, folder: Path, **options: object) -> Verdict:
    folder.mkdir()
    comparison = CompareOptions(str(expected), str(actual), **options)  # type: ignore[arg-type]
    return compare(comparison, folder, SilentProgress())


def double_scale(network: Any) -> None:
    """Make the second block's own code 2 % wrong."""
    network.layers[1].scale = 1.02


def halve(network: Network) -> None:
    network.to(torch.bfloat16)
