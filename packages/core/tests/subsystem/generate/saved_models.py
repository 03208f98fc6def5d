"""Save tiny models with random weights, next to the faults that a test plants."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from assay.models.transformers_calls import quiet_transformers


def save_random(folder: Path, kind: type[PreTrainedModel], config: Any, plants: str) -> Path:
    """Save a model whose weights are large enough for attention to matter. plants: text of plants.py."""
    torch.manual_seed(0)
    with quiet_transformers():
        model: Any = kind(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(3)
            if (head := getattr(model, "lm_head", None)) is not None:
                # A head of its own: transformers does not tie stored weights that differ.
                head.weight = torch.nn.Parameter(torch.randn_like(head.weight))
        model.save_pretrained(folder)
    (folder / "plants.py").write_text(plants)
    return folder
