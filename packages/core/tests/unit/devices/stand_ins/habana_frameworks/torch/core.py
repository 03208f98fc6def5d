"""Stand-in of habana_frameworks.torch.core."""

from typing import Any

import torch


def mark_step() -> None:
    torch_module: Any = torch
    torch_module.hpu.asked.append("mark_step")
