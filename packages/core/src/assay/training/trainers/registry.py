"""Trainers by name, and what is said when one of a user fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from assay.errors import AssayError, UsageError
from assay.models.candidate_setup import SetupError
from assay.models.loading.configs import attention_of
from assay.plugins import PluginError, load_object
from assay.training.protocol import TrainingPlan
from assay.training.trainers.setups import called

# Where other packages register trainers: NAME = "MODULE:CLASS".
GROUP = "assay.trainers"

NAMED: dict[str, tuple[str, str]] = {
    "reference": ("assay.training.trainers.reference", "ReferenceTrainer"),
    "ddp": ("assay.training.trainers.ddp", "DDPTrainer"),
    "fsdp": ("assay.training.trainers.fsdp", "FSDPTrainer"),
    "pipeline": ("assay.training.trainers.pipeline", "PipelineTrainer"),
    "tensor-parallel": ("assay.training.trainers.tensor_parallel", "TensorParallelTrainer"),
}

_METHODS = ("setup", "step", "save", "load", "state_dict", "load_state_dict", "teardown")


class TrainerError(UsageError):
    """A trainer that cannot be used."""


def require_trainer(name: str | None) -> None:
    """Make sure that NAME or FILE.py:CLASS can mean a trainer, without importing it.

    Raises: TrainerError, PluginError.
    """
    known = [*NAMED, *entry_points(group=GROUP).names]
    if name is None or name in known:
        return
    if ":" not in name:
        raise TrainerError(
            f"no trainer called {name!r}; there are: {', '.join(known)}, or FILE.py:CLASS"
        )
    file = Path(name.rpartition(":")[0]).expanduser()
    if not file.is_file():
        raise PluginError(f"{name}: there is no file {file}")


def open_trainer(name: str | None, plan: TrainingPlan) -> Any:  # noqa: ANN401 - any trainer
    """The trainer that NAME or FILE.py:CLASS names, set up; None is the reference trainer.

    Raises: TrainerError, PluginError or SetupError for one that cannot be used.
    """
    require_trainer(name)
    title = name or "reference"
    with trainer_errors(title, "being made"):
        trainer = _class_of(title)()
    missing = [method for method in _METHODS if not callable(getattr(trainer, method, None))]
    if missing:
        raise TrainerError(f"{title} is no trainer: it has no {', '.join(missing)}")
    with trainer_errors(title, "setup"):
        trainer.setup(plan)
    for attribute, kind in (("model", nn.Module), ("optimizer", torch.optim.Optimizer)):
        if not isinstance(getattr(trainer, attribute, None), kind):
            raise TrainerError(f"{title} has no {attribute} after setup(plan)")
    if plan.setup is not None and plan.setup not in called:
        raise SetupError.not_called(plan.setup, title)
    return trainer


def describe_trainer(name: str | None, plan: TrainingPlan, model: nn.Module) -> dict[str, Any]:
    """What a verdict says of it, as JSON values."""
    return {
        "attention": attention_of(model),
        "trainer": name or "reference",
        "setup": plan.setup,
        "mesh": dict(plan.mesh),
        "features": sorted(plan.features),
    }


def _class_of(name: str) -> Any:  # noqa: ANN401 - any trainer's class
    if name in entry_points(group=GROUP).names:
        return entry_points(group=GROUP)[name].load()
    if name not in NAMED:
        return load_object(name)
    module, attribute = NAMED[name]
    return getattr(import_module(module), attribute)


@contextmanager
def trainer_errors(trainer: str, doing: str) -> Iterator[None]:
    """Inside, only code of the trainer runs: what it raises is said in one message.

    In a world of ranks the launcher says more: which rank, where, and where the others waited.
    """
    try:
        yield
    except AssayError:
        raise
    except (Exception, SystemExit) as error:
        if dist.is_initialized():
            raise
        raise TrainerError(
            f"trainer {trainer} raised {type(error).__name__} in {doing}: {error}"
        ) from error
