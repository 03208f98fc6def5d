"""Measures how well trained weights predict a few sequences, independent of reported losses.

Shapes: B rows, T positions, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from assay.training.batches import IGNORED, MicroBatch
from assay.training.overfit.requests import Memorization
from assay.training.state.files import read_state, write_state
from assay.training.state.states import plain_name

_FILE = "trained"

Targets = Callable[[MicroBatch], Tensor]


def _prompts(micro_batch: MicroBatch) -> Tensor:
    """Return the next token where it is text with a masked label."""
    is_prompt = (micro_batch["labels"] == IGNORED) & (micro_batch["attention_mask"] == 1)
    return _shifted(torch.where(is_prompt, micro_batch["input_ids"], IGNORED), 1)


def _padding(micro_batch: MicroBatch) -> Tensor:
    """Return the next token where it is padding."""
    is_padding = micro_batch["attention_mask"] == 0
    return _shifted(torch.where(is_padding, micro_batch["input_ids"], IGNORED), 1)


def _shifted(targets_BT: Tensor, places: int) -> Tensor:
    return functional.pad(targets_BT[:, places:], (0, places), value=IGNORED)


# The kind to be memorized, and kinds that faulty trainers memorize.
LABELS = "labels"
KINDS: Mapping[str, Targets] = {
    LABELS: lambda micro_batch: _shifted(micro_batch["labels"], 1),
    "prompt": _prompts,
    "padding": _padding,
    "labels not shifted": lambda micro_batch: micro_batch["labels"],
    "labels shifted twice": lambda micro_batch: _shifted(micro_batch["labels"], 2),
}


def measure_memorization(model: nn.Module, batch: Sequence[MicroBatch]) -> Memorization:
    """Return the mean loss of `model` per token of each kind, in nats, without dropout."""
    sums, counts = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for micro_batch in batch:
            logits_BTV: Any = model(
                input_ids=micro_batch["input_ids"], attention_mask=micro_batch["attention_mask"]
            ).logits
            for kind, targets_of in KINDS.items():
                targets_BT = targets_of(micro_batch)
                counts[kind] += int((targets_BT != IGNORED).sum())
                sums[kind] += float(
                    functional.cross_entropy(
                        logits_BTV.double().flatten(0, 1),
                        targets_BT.flatten(),
                        ignore_index=IGNORED,
                        reduction="sum",
                    )
                )
    model.train(was_training)
    return Memorization(nats={kind: sums[kind] / counts[kind] for kind in KINDS if counts[kind]})


def write_trained(folder: Path, number: int, weights: Mapping[str, Tensor]) -> None:
    """Write the whole weights of rank `number`, by their names in the unwrapped model."""
    folder.mkdir(parents=True, exist_ok=True)
    write_state(folder / f"{_FILE}-{number}", {"model": dict(weights)})


def read_trained(folder: Path) -> dict[str, Tensor]:
    """Read the weights of all ranks."""
    weights: dict[str, Tensor] = {}
    for path in sorted(folder.glob(f"{_FILE}-*.json")):
        weights |= read_state(path.with_suffix(""))["model"]
    return weights


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> list[str]:
    """Copy `weights` into `model`, and return the names that are missing or have another shape."""
    missing = []
    with torch.no_grad():
        for name, value in model.state_dict().items():
            given = weights.get(plain_name(name))
            if given is None or given.shape != value.shape:
                missing.append(plain_name(name))
            else:
                value.copy_(given)
    return missing
