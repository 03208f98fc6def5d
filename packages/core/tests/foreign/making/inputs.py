"""What every script here captures: one prompt, and the folders of a model with and without a fault."""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

MODELS, TRACES = map(Path, sys.argv[1:3])
IDS = torch.arange(12)[None] * 7 % 120 + 3


def folders(framework: str, model: str) -> Iterator[tuple[Path, Path]]:
    """Return the folder of each variant of a model, and the folder for its trace."""
    for folder in sorted((MODELS / model).iterdir()):
        yield folder, TRACES / f"{framework}-{model}-{folder.name}"
