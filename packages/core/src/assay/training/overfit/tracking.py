"""Curves of a run where people watch training: TensorBoard, Weights & Biases.

Both are optional. Importing this file imports neither.
"""

import math
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from assay.errors import UsageError
from assay.training.overfit.requests import Curve

# Of each side, such as "candidate" and "yardstick", its curve.
Curves = Mapping[str, Curve]

_PROJECT = "assay"


class TrackerError(UsageError):
    """Curves that cannot be tracked as asked."""

    @classmethod
    def unknown(cls, name: str) -> "TrackerError":
        """There is no such tracker."""
        return cls(f"--track {name}: there are {', '.join(TRACKERS)}")

    @classmethod
    def absent(cls, name: str) -> "TrackerError":
        """Its package is not installed."""
        return cls(
            f"--track {name}: the package {name} is not installed: pip install 'assay-core[{name}]'"
        )


def require_tracker(name: str) -> None:
    """Make sure that curves can be written for `name`, without importing it.

    Raises: TrackerError.
    """
    if name not in TRACKERS:
        raise TrackerError.unknown(name)
    spec = find_spec(name)
    # Without an origin it is a folder that happens to bear the name, such as wandb's own.
    if spec is None or spec.origin is None:
        raise TrackerError.absent(name)


def track(name: str, curves: Curves, folder: Path, facts: Mapping[str, Any]) -> Path:
    """Write `curves` below `folder` as the tracker `name` reads them.

    facts: JSON values that say what was run.

    Returns: the folder that holds them.
    """
    return TRACKERS[name](curves, folder, facts)


def _write_tensorboard(curves: Curves, folder: Path, facts: Mapping[str, Any]) -> Path:
    """One run of TensorBoard for each side: they share their charts."""
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
    """One run of Weights & Biases; offline, unless WANDB_MODE says otherwise."""
    # By name: types are checked where it is not installed, too.
    wandb: Any = import_module("wandb")
    root = folder / "wandb"
    run: Any = wandb.init(
        project=os.environ.get("WANDB_PROJECT", _PROJECT),
        name=folder.name,
        dir=str(folder),
        mode=os.environ.get("WANDB_MODE", "offline"),
        config=dict(facts),
        # Standard output belongs to the verdict.
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
    # Its service writes on after finish() has returned.
    wandb.teardown()
    return root


TRACKERS: Mapping[str, Callable[[Curves, Path, Mapping[str, Any]], Path]] = {
    "tensorboard": _write_tensorboard,
    "wandb": _write_wandb,
}
