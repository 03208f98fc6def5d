"""Times of writing and reading a checkpoint."""

import shutil
from pathlib import Path

import pytest

from assay.models import LoadedModel
from assay.training.batches import coder_of, training_batches
from assay.training.protocol import TrainingPlan
from assay.training.trainers.reference import ReferenceTrainer
from assay_bench.performance.requests import SuiteRequest
from assay_bench.performance.suites.measurement import Amounts, SuiteTimer


@pytest.fixture(scope="module")
def trainer(suite_request: SuiteRequest, loaded: LoadedModel) -> ReferenceTrainer:
    """Make a trainer after one step, so that its optimizer has moments."""
    del loaded  # requested because it sets the number of threads
    trainer = ReferenceTrainer()
    trainer.setup(TrainingPlan(model=suite_request.model, run=suite_request.run, micro_batches=1))
    (batch,) = training_batches(coder_of(suite_request.model), steps=1, micro_batches=1)
    trainer.step(batch)
    return trainer


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_save(measure: SuiteTimer, trainer: ReferenceTrainer, tmp_path: Path) -> None:
    """Write model, moments and generators into a new folder."""
    folder = tmp_path / "checkpoint"
    trainer.save(folder)
    num_bytes = _bytes_in(folder)
    assert num_bytes > 0

    def empty() -> Path:
        shutil.rmtree(folder)
        return folder

    measure(empty, trainer.save, Amounts(num_bytes=num_bytes))


def test_load(measure: SuiteTimer, trainer: ReferenceTrainer, tmp_path: Path) -> None:
    """Read the same into a trainer that is set up."""
    trainer.save(tmp_path)
    num_bytes = _bytes_in(tmp_path)
    assert num_bytes > 0
    measure(lambda: tmp_path, trainer.load, Amounts(num_bytes=num_bytes))
