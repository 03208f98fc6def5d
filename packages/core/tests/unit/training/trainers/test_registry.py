from pathlib import Path

import pytest

from assay.errors import UsageError
from assay.training.protocol import (
    PHASE_METHODS,
    ObservableTrainer,
    TrainerTraits,
    TrainingPlan,
)
from assay.training.trainers.reference import ReferenceTrainer
from assay.training.trainers.registry import (
    open_trainer,
    pipeline_shapes_of,
    require_trainer,
    try_trainer,
)

PLAN = TrainingPlan(model="m", run="cpu/float32")
SOURCE = """
from torch import nn, optim
from assay.training import TrainerTraits

class Good:
    def setup(self, plan):
        self.model = nn.Linear(2, 2)
        self.optimizer = optim.SGD(self.model.parameters())
    step = save = load = state_dict = load_state_dict = teardown = lambda self, *a: None

class NoOptimizer(Good):
    def setup(self, plan):
        self.model = nn.Linear(2, 2)

class NoMethods:
    pass

class Special(Good):
    traits = TrainerTraits(invisible_phases={"clip": "the optimizer clips"}, scheduled_module="")
    compute_loss = run_schedule = lambda self, *a: None
    backward = None

class TraitsOfAnotherKind(Good):
    traits = {"clip": "the optimizer clips"}

class NoSuchPhase(Good):
    traits = TrainerTraits(invisible_phases={"reduction": "fused"})

class TakesOthers(Good):
    pipeline_shapes = "equal-first-step"

class TakesAnything(Good):
    pipeline_shapes = "all"

class Exits(Good):
    def setup(self, plan):
        raise SystemExit(0)

class Asserts(Good):
    def setup(self, plan):
        assert plan is None
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trainers.py"
    path.write_text(SOURCE)
    return path


def test_trainer_of_a_file_is_opened_and_set_up(file: Path) -> None:
    assert open_trainer(f"{file}:Good", PLAN).root.in_features == 2


def test_trainer_that_declares_nothing_has_default_traits(file: Path) -> None:
    opened = open_trainer(f"{file}:Good", PLAN)

    assert opened.traits == TrainerTraits()
    assert opened.methods == {}
    assert opened.invisible_phases == {
        "forward": "the trainer has no method compute_loss",
        "backward": "the trainer has no method backward",
        "reduce": "the trainer has no method reduce_gradients",
        "clip": "the trainer has no method clip_gradients",
        "optimizer": "the trainer has no method optimizer_step",
    }


def test_traits_and_methods_are_read_when_a_trainer_is_opened(file: Path) -> None:
    opened = open_trainer(f"{file}:Special", PLAN)

    assert sorted(opened.methods) == ["compute_loss", "run_schedule"]
    assert opened.invisible_phases["clip"] == "the optimizer clips"
    assert opened.invisible_phases["backward"] == "the trainer has no method backward"
    assert "forward" not in opened.invisible_phases
    assert opened.root is opened.trainer.model


def test_trainer_is_tried_without_its_setup(file: Path) -> None:
    try_trainer(f"{file}:Exits", 1)
    with pytest.raises(UsageError, match="is no trainer"):
        try_trainer(f"{file}:NoMethods", 1)


def test_trainer_for_several_ranks_is_imported_alone(file: Path) -> None:
    try_trainer(f"{file}:NoMethods", 2)
    with pytest.raises(UsageError, match="unknown function 'Absent'"):
        try_trainer(f"{file}:Absent", 2)


def test_reference_trainer_is_an_observable_trainer() -> None:
    trainer: ObservableTrainer = ReferenceTrainer()  # checked by mypy

    assert all(callable(getattr(trainer, method)) for method in PHASE_METHODS.values())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoOptimizer", r"has no optimizer after setup\(plan\)$"),
        ("NoMethods", "is no trainer: it has no setup, step, save"),
        ("Exits", "in setup, raised SystemExit: 0\\n"),
        ("Asserts", r"in setup, raised AssertionError\n  .*:\d+, in setup: assert plan is None$"),
        ("Absent", "unknown function 'Absent'"),
        ("TraitsOfAnotherKind", "are of dict, no TrainerTraits$"),
        ("NoSuchPhase", "declare phases that do not exist: reduction; there are: forward, "),
    ],
)
def test_what_is_no_trainer_is_refused(file: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_trainer(f"{file}:{name}", PLAN)


def test_setup_function_that_is_never_called_is_an_error(file: Path) -> None:
    plan = TrainingPlan(model="m", run="cpu/float32", setup="plant.py:detach")

    with pytest.raises(UsageError, match=r"Good never called plant\.py:detach"):
        open_trainer(f"{file}:Good", plan)


def test_names_are_checked_without_importing_anything(tmp_path: Path) -> None:
    require_trainer(None)
    require_trainer("reference")
    with pytest.raises(UsageError, match="no trainer called 'mine'; there are: reference"):
        require_trainer("mine")
    with pytest.raises(UsageError, match="there is no file"):
        require_trainer(f"{tmp_path}/absent.py:Mine")


@pytest.mark.parametrize(
    ("name", "shapes"), [("Good", "equal"), ("TakesOthers", "equal-first-step")]
)
def test_pipelines_take_one_shape_unless_their_class_declares_more(
    file: Path, name: str, shapes: str
) -> None:
    assert pipeline_shapes_of(f"{file}:{name}") == shapes


def test_shapes_that_do_not_exist_are_refused(file: Path) -> None:
    with pytest.raises(UsageError, match="TakesAnything is 'all'; it is one of: unequal, equal-"):
        pipeline_shapes_of(f"{file}:TakesAnything")
