"""Trainers by name: opened, read once, and with one message for each way in which one fails."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn

from assay.errors import AssayError, UsageError, raised_in_words
from assay.models.candidate_setup import SetupError
from assay.models.loading.configs import attention_of
from assay.plugins import PluginError, load_object
from assay.training.protocol import (
    PHASE_METHODS,
    SCHEDULE_METHOD,
    Trainer,
    TrainerTraits,
    TrainingPlan,
)
from assay.training.shapes import PIPELINE_SHAPES, Shapes
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


@dataclass(frozen=True, slots=True)
class OpenedTrainer:
    """A trainer after its `setup`, with all that a check reads of it beyond the protocol `Trainer`.

    name: NAME or FILE.py:CLASS, for messages.
    traits: what the trainer declares about itself.
    methods: by name those methods of an ObservableTrainer, and of a schedule, that the trainer has
        for phases.
    """

    trainer: Trainer
    name: str
    traits: TrainerTraits
    methods: Mapping[str, Callable[..., Any]]

    @classmethod
    def of(cls, trainer: Trainer, name: str) -> "OpenedTrainer":
        """Read a trainer whose `setup` has been called.

        Raises: TrainerError for what is not as the protocol says.
        """
        for attribute, kind in (("model", nn.Module), ("optimizer", torch.optim.Optimizer)):
            if not isinstance(getattr(trainer, attribute, None), kind):
                raise TrainerError(f"{name} has no {attribute} after setup(plan)")
        with _errors_of(name, "traits"):
            traits = getattr(trainer, "traits", TrainerTraits())
        if not isinstance(traits, TrainerTraits):
            raise TrainerError(f"traits of {name} are of {type(traits).__name__}, no TrainerTraits")
        if unknown := sorted(traits.invisible_phases.keys() - PHASE_METHODS.keys()):
            raise TrainerError(
                f"traits of {name} declare phases that do not exist: {', '.join(unknown)}; there"
                f" are: {', '.join(PHASE_METHODS)}"
            )
        names = list(PHASE_METHODS.values())
        if traits.scheduled_module is not None:
            names.append(SCHEDULE_METHOD)
        found = {method: getattr(trainer, method, None) for method in names}
        methods = {method: value for method, value in found.items() if callable(value)}
        return cls(trainer, name, traits, methods)

    @property
    def invisible_phases(self) -> dict[str, str]:
        """Phases that cannot be observed, each with the reason."""
        reasons: dict[str, str] = {
            phase: f"the trainer has no method {method}"
            for phase, method in PHASE_METHODS.items()
            if method not in self.methods
        }
        reasons.update(self.traits.invisible_phases.items())
        return reasons

    @property
    def root(self) -> nn.Module:
        """The module that is called once for each micro-batch."""
        return self.trainer.model.get_submodule(self.traits.scheduled_module or "")

    @contextmanager
    def errors_in(self, method: str) -> Iterator[None]:
        """Inside, only `method` of the trainer runs. Raises: TrainerError for what it raises."""
        with _errors_of(self.name, method):
            yield


def open_trainer(name: str | None, plan: TrainingPlan) -> OpenedTrainer:
    """The trainer that NAME or FILE.py:CLASS names, set up; None is the reference trainer.

    Raises: TrainerError, PluginError or SetupError for one that cannot be used.
    """
    title = name or "reference"
    trainer = construct_trainer(title)
    with _errors_of(title, "setup"):
        trainer.setup(plan)
    opened = OpenedTrainer.of(trainer, title)
    if plan.setup is not None and plan.setup not in called:
        raise SetupError.not_called(plan.setup, title)
    return opened


def construct_trainer(name: str) -> Trainer:
    """The trainer that NAME or FILE.py:CLASS names, before its `setup`.

    Raises: TrainerError or PluginError for a class that cannot be found or is none of a trainer.
    """
    require_trainer(name)
    with _errors_of(name, "being made"):
        trainer: Trainer = _class_of(name)()
    missing = [method for method in _METHODS if not callable(getattr(trainer, method, None))]
    if missing:
        raise TrainerError(f"{name} is no trainer: it has no {', '.join(missing)}")
    return trainer


def try_trainer(name: str, num_ranks: int) -> None:
    """Construct a trainer; for several ranks import its class alone: it may need their group.

    Raises: TrainerError or PluginError for one that could not be opened.
    """
    if num_ranks == 1:
        construct_trainer(name)
        return
    require_trainer(name)
    with _errors_of(name, "being imported"):
        _class_of(name)


def pipeline_shapes_of(name: str) -> Shapes:
    """What the pipelines of a trainer take, as its class declares it.

    Raises: TrainerError for another declaration than there are.
    """
    shapes: Shapes = getattr(_class_of(name), PIPELINE_SHAPES, "equal")
    if shapes not in get_args(Shapes):
        raise TrainerError(
            f"{PIPELINE_SHAPES} of {name} is {shapes!r}; it is one of: {', '.join(get_args(Shapes))}"
        )
    return shapes


def describe_trainer(name: str | None, plan: TrainingPlan, model: nn.Module) -> dict[str, Any]:
    """What a verdict says of it, as JSON values."""
    return {
        "attention": attention_of(model),
        "trainer": name or "reference",
        "setup": plan.setup,
        "mesh": dict(plan.mesh),
        "features": sorted(plan.features),
    }


def _class_of(name: str) -> Callable[[], Any]:
    if name in entry_points(group=GROUP).names:
        registered: Callable[[], Any] = entry_points(group=GROUP)[name].load()
        return registered
    if name not in NAMED:
        return load_object(name)
    module, attribute = NAMED[name]
    named: Callable[[], Any] = getattr(import_module(module), attribute)
    return named


@contextmanager
def _errors_of(trainer: str, doing: str) -> Iterator[None]:
    """Inside, only code of the trainer runs: what it raises becomes one message.

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
            f"trainer {trainer}, in {doing}, raised {raised_in_words(error)}"
        ) from error
