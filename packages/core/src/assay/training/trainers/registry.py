"""Opens trainers by name, reads their declarations once, and reports their errors."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn

from assay.errors import AssayError, UsageError, raised_in_words
from assay.models.candidate_code import called
from assay.models.config_files import attention_of
from assay.plugins import load_object
from assay.sites import Phase
from assay.training.protocol import (
    ADAMW_SETTINGS,
    PHASE_METHODS,
    PIPELINE_SHAPES,
    SCHEDULE_METHOD,
    STATED_FIELDS,
    STATED_PLAN,
    Shapes,
    Trainer,
    TrainerTraits,
    TrainingPlan,
)
from assay.training.reports import ReplayFindings

# Where other packages register trainers: NAME = "MODULE:CLASS".
GROUP = "assay.trainers"

NAMED: dict[str, tuple[str, str]] = {
    "reference": ("assay.training.trainers.reference", "ReferenceTrainer"),
    "ddp": ("assay.training.trainers.parallel", "DDPTrainer"),
    "fsdp": ("assay.training.trainers.parallel", "FSDPTrainer"),
    "pipeline": ("assay.training.trainers.parallel", "PipelineTrainer"),
    "tensor-parallel": ("assay.training.trainers.parallel", "TensorParallelTrainer"),
}

_METHODS = ("setup", "step", "save", "load", "state_dict", "load_state_dict", "teardown")


def require_trainer(name: str | None) -> None:
    """Raise UsageError if NAME or FILE.py:CLASS does not exist; do not import it."""
    known = [*NAMED, *entry_points(group=GROUP).names]
    if name is None or name in known:
        return
    if ":" not in name:
        raise UsageError(
            f"no trainer called {name!r}; there are: {', '.join(known)}, or FILE.py:CLASS"
        )
    file = Path(name.rpartition(":")[0]).expanduser()
    if not file.is_file():
        raise UsageError(f"{name}: there is no file {file}")


@dataclass(frozen=True, slots=True)
class OpenedTrainer:
    """A trainer after its `setup`, with its traits and the methods of its phases."""

    trainer: Trainer
    name: str
    """NAME or FILE.py:CLASS, for messages."""
    traits: TrainerTraits
    methods: Mapping[str, Callable[..., Any]]
    """The trainer's methods for phases or for a schedule, by name."""

    @classmethod
    def of(cls, trainer: Trainer, name: str) -> "OpenedTrainer":
        """Read a trainer after its `setup`. Raises: UsageError for a violation of the protocol."""
        for attribute, kind in (("model", nn.Module), ("optimizer", torch.optim.Optimizer)):
            if not isinstance(getattr(trainer, attribute, None), kind):
                raise UsageError(f"{name} has no {attribute} after setup(plan)")
        with _errors_of(name, "traits"):
            traits = getattr(trainer, "traits", TrainerTraits())
        if not isinstance(traits, TrainerTraits):
            raise UsageError(f"traits of {name} are of {type(traits).__name__}, no TrainerTraits")
        if unknown := sorted(traits.invisible_phases.keys() - PHASE_METHODS.keys()):
            raise UsageError(
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
    def invisible_phases(self) -> dict[Phase, str]:
        """Phases that cannot be observed, with their reasons."""
        reasons = {
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

    def errors_in(self, method: str) -> AbstractContextManager[None]:
        """Return a context that converts errors of the trainer's `method` to UsageError."""
        return _errors_of(self.name, method)


def open_trainer(name: str | None, plan: TrainingPlan) -> OpenedTrainer:
    """Construct and set up a trainer by NAME or FILE.py:CLASS; None is the reference trainer.

    Raises: UsageError.
    """
    title = name or "reference"
    trainer = construct_trainer(title)
    with _errors_of(title, "setup"):
        trainer.setup(plan)
    opened = OpenedTrainer.of(trainer, title)
    if plan.setup is not None and plan.setup not in called:
        raise UsageError(
            f"{title} never called {plan.setup}: its setup has to call"
            " assay.training.set_up(model, plan.setup), as build_model of ReferenceTrainer does"
        )
    return opened


def construct_trainer(name: str) -> Trainer:
    """Construct a trainer by NAME or FILE.py:CLASS, without `setup`.

    Raises: UsageError for a class that does not exist or is not a trainer.
    """
    require_trainer(name)
    with _errors_of(name, "being made"):
        trainer: Trainer = _class_of(name)()
    missing = [method for method in _METHODS if not callable(getattr(trainer, method, None))]
    if missing:
        raise UsageError(f"{name} is no trainer: it has no {', '.join(missing)}")
    return trainer


def try_trainer(name: str, num_ranks: int) -> None:
    """Construct a trainer; for several ranks only import its class, which may need their group.

    Raises: UsageError.
    """
    if num_ranks == 1:
        construct_trainer(name)
        return
    require_trainer(name)
    with _errors_of(name, "being imported"):
        _class_of(name)


def pipeline_shapes_of(name: str) -> Shapes:
    """Return the shapes that a trainer's pipelines accept, as its class declares them.

    Raises: UsageError for an unknown declaration.
    """
    shapes: Shapes = getattr(_class_of(name), PIPELINE_SHAPES, "equal")
    if shapes not in get_args(Shapes):
        raise UsageError(
            f"{PIPELINE_SHAPES} of {name} is {shapes!r}; it is one of: {', '.join(get_args(Shapes))}"
        )
    return shapes


def stated_plan_of(name: str) -> dict[str, Any]:
    """Return the fields of the plan that a trainer's class states. Raises: UsageError for others."""
    stated = getattr(_class_of(name), STATED_PLAN, {})
    if not isinstance(stated, Mapping) or stated.keys() - STATED_FIELDS:
        raise UsageError(
            f"{STATED_PLAN} of {name} is {stated!r}; it is a mapping with the keys:"
            f" {', '.join(sorted(STATED_FIELDS))}"
        )
    for group in stated.get("parameter_groups", {}).values():
        if unknown := sorted(group.keys() - {"lr", *ADAMW_SETTINGS}):
            raise UsageError(
                f"{STATED_PLAN} of {name}: parameter_groups have {', '.join(unknown)}; there are:"
                f" lr, {', '.join(ADAMW_SETTINGS)}"
            )
    return dict(stated)


def describe_trainer(name: str | None, plan: TrainingPlan, model: nn.Module) -> dict[str, Any]:
    """Describe a trainer for a verdict, as JSON values."""
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
    """Convert errors of the trainer's code, which runs inside, to UsageError.

    With several ranks they pass: the launcher reports the rank, and where the others waited.
    """
    try:
        yield
    except AssayError:
        raise
    except (Exception, SystemExit) as error:
        if dist.is_initialized():
            raise
        raise UsageError(
            f"trainer {trainer}, in {doing}, raised {raised_in_words(error)}"
        ) from error


def declared_traits(opened: OpenedTrainer, found: ReplayFindings | None = None) -> TrainerTraits:
    """Report what a trainer declares, and which phases its steps showed according to `found`."""
    found, declared = found or ReplayFindings(), opened.traits
    shown = found.seen - declared.invisible_phases.keys()
    hidden = {k: v for k, v in opened.invisible_phases.items() if k not in shown} | found.hidden
    return replace(
        declared,
        invisible_phases=hidden,
        partial_modules=frozenset(declared.partial_modules),
        unmeasured_ports=frozenset(declared.unmeasured_ports),
        layout=None,
        notes=tuple(declared.notes),
    )
