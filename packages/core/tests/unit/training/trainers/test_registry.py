from pathlib import Path

import pytest

from assay.errors import UsageError
from assay.models.candidate_setup import SetupError
from assay.training.protocol import TrainingPlan
from assay.training.trainers.registry import open_trainer, require_trainer

PLAN = TrainingPlan(model="m", run="cpu/float32")
SOURCE = """
from torch import nn, optim

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

class Exits(Good):
    def setup(self, plan):
        raise SystemExit(0)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "trainers.py"
    path.write_text(SOURCE)
    return path


def test_trainer_of_a_file_is_opened_and_set_up(file: Path) -> None:
    assert open_trainer(f"{file}:Good", PLAN).model.in_features == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoOptimizer", r"has no optimizer after setup\(plan\)$"),
        ("NoMethods", "is no trainer: it has no setup, step, save"),
        ("Exits", "raised SystemExit in setup: 0$"),
        ("Absent", "has no function Absent"),
    ],
)
def test_what_is_no_trainer_is_refused(file: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_trainer(f"{file}:{name}", PLAN)


def test_setup_function_that_is_never_called_is_an_error(file: Path) -> None:
    plan = TrainingPlan(model="m", run="cpu/float32", setup="plant.py:detach")

    with pytest.raises(SetupError, match=r"Good never called plant\.py:detach"):
        open_trainer(f"{file}:Good", plan)


def test_names_are_checked_without_importing_anything(tmp_path: Path) -> None:
    require_trainer(None)
    require_trainer("reference")
    with pytest.raises(UsageError, match="no trainer called 'mine'; there are: reference"):
        require_trainer("mine")
    with pytest.raises(UsageError, match="there is no file"):
        require_trainer(f"{tmp_path}/absent.py:Mine")
