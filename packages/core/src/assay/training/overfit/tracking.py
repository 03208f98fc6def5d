"""Writes the curves of a run for TensorBoard or Weights & Biases, without importing either early."""

import math
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from assay.errors import UsageError
from assay.training.overfit.requests import LossCurve

# By side, such as "candidate" and "yardstick".
Curves = Mapping[str, LossCurve]

_PROJECT = "assay"


def require_tracker(name: str) -> None:
    """Raise UsageError if curves cannot be written for `name`; do not import it."""
    if name not in TRACKERS:
        raise UsageError(f"--track {name}: there are {', '.join(TRACKERS)}")
    spec = find_spec(name)
    # Without an origin it is a folder with the same name, such as wandb's own output folder.
    if spec is None or spec.origin is None:
        raise UsageError(
            f"--track {name}: the package {name} is not installed: pip install 'assay-core[{name}]'"
        )


def track(name: str, curves: Curves, folder: Path, facts: Mapping[str, Any]) -> Path:
    """Write `curves` and the JSON values `facts` for the tracker `name`; return their folder."""
    return TRACKERS[name](curves, folder, facts)


def _write_tensorboard(curves: Curves, folder: Path, facts: Mapping[str, Any]) -> Path:
    """Write one TensorBoard run for each side, so that they share charts."""
    from torch.utils.tensorboard.writer import SummaryWriter

    root = folder / "tensorboard"
    for side, curve in curves.items():
        writer: Any = SummaryWriter(str(root / side))
        for key, value in facts.items():
            writer.add_text(key, str(value))
        for step, (loss, norm) in enumerate(zip(curve.losses, curve.grad_norms, strict=True)):
            writer.add_scalar("loss", loss, step)
            writer.add_scalar("grad_norm", norm, step)
        writer.close()
    return root


def _write_wandb(curves: Curves, folder: Path, facts: Mapping[str, Any]) -> Path:
    """Write one run of Weights & Biases, offline unless WANDB_MODE is set."""
    # Imported by name, because types are also checked where it is not installed.
    wandb: Any = import_module("wandb")
    root = folder / "wandb"
    run: Any = wandb.init(
        project=os.environ.get("WANDB_PROJECT", _PROJECT),
        name=folder.name,
        dir=str(folder),
        mode=os.environ.get("WANDB_MODE", "offline"),
        config=dict(facts),
        # Standard output is reserved for the verdict.
        settings=wandb.Settings(silent=True, console="off"),
    )
    length = max((len(curve.losses) for curve in curves.values()), default=0)
    for step in range(length):
        row = {}
        for side, curve in curves.items():
            if step < len(curve.losses):
                row[f"loss/{side}"] = curve.losses[step]
                row[f"grad_norm/{side}"] = curve.grad_norms[step]
        run.log({key: value for key, value in row.items() if not math.isnan(value)}, step=step)
    run.finish()
    # Its service keeps writing after finish() has returned.
    wandb.teardown()
    return root


TRACKERS: Mapping[str, Callable[[Curves, Path, Mapping[str, Any]], Path]] = {
    "tensorboard": _write_tensorboard,
    "wandb": _write_wandb,
}
