"""Every bad input gets one clear error and exit code 2."""

from pathlib import Path

import pytest

from packages.core.tests.subsystem.training.conftest import RunTrain

CPU = ("--candidate", "cpu/float32")


@pytest.fixture
def trainers(tmp_path: Path) -> Path:
    path = tmp_path / "trainers.py"
    path.write_text(
        "from assay.training.trainers.reference import ReferenceTrainer\n"
        "class NoTrainer:\n    pass\n"
        "class Raises(ReferenceTrainer):\n"
        "    def __init__(self):\n        raise RuntimeError('no such fabric')\n"
        "class TwoNumbers(ReferenceTrainer):\n"
        "    def compute_loss(self, micro_batch, num_step_tokens):\n"
        "        loss = super().compute_loss(micro_batch, num_step_tokens)\n"
        "        return loss.expand(2)\n"
        "class Stubborn(ReferenceTrainer):\n"
        "    def build_model(self, plan):\n"
        "        from assay.models import load_model\n"
        "        return load_model(plan.model, dtype='float32').model.train()\n"
        "def nothing(model):\n    pass\n"
    )
    return path


def error_of(run: object, code: int = 2) -> str:
    assert run.code == code, run.stderr  # type: ignore[attr-defined]
    text: str = run.stderr  # type: ignore[attr-defined]
    assert "Traceback" not in text
    assert text.count("assay: ") == 1
    return text[text.index("assay: ") :]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--steps", "0"), "--steps 0: a run that is resumed needs at least 2"),
        (("--resume-at", "3"), "--resume-at 3: a run of 3 steps can be resumed after 1 to 2"),
        (("--resume-at", "0"), "--resume-at 0: a run of 3 steps can be resumed after 1 to 2"),
        (("--micro-batches", "0"), "--micro-batches=0: must be a whole number from 1 to 1,000,000"),
        (("--steps", "99999999999"), "--steps=99999999999: must be a whole number from 1 to"),
        (("--seed", str(2**63)), f"--seed={2**63}: must be a whole number from -"),
        (("--learning-rate", "inf"), "--learning-rate inf: "),
        (("--mesh", f"dp={'9' * 5000}"), "must be a whole number from 1 to 1,000,000"),
        (("--limits", "no-such"), "no limits called 'no-such'"),
        (("--disk", "1M"), "of disk, but --disk allows 1.0 MB. Use fewer --steps"),
        (("--disk", "1 apple"), "'1 apple' is not a size such as 500M or 20G"),
        (("--candidate-trainer", "no-such"), "no trainer called 'no-such'; there are: reference"),
    ],
)
def test_options_that_cannot_be(train: RunTrain, arguments: tuple[str, str], message: str) -> None:
    assert message in error_of(train(*CPU, *arguments))


def test_unknown_device_is_refused_before_anything_runs(train: RunTrain) -> None:
    assert "no-such" in error_of(train("--candidate", "no-such/float32"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Absent", "unknown function 'Absent'"),
        ("NoTrainer", "is no trainer: it has no setup, step"),
        ("Raises", "in being made, raised RuntimeError: no such fabric"),
    ],
)
def test_trainer_that_cannot_be_used_is_refused_before_the_reference_runs(
    train: RunTrain, trainers: Path, name: str, message: str
) -> None:
    run = train(*CPU, "--candidate-trainer", f"{trainers}:{name}")

    assert message in error_of(run)
    assert not (run.folder / "golden").exists()


@pytest.mark.parametrize("arguments", [(), ("--overfit",), ("--mesh", "dp=2")])
def test_setup_function_that_is_not_there_is_refused_before_the_reference_runs(
    train: RunTrain, trainers: Path, arguments: tuple[str, ...]
) -> None:
    run = train(*CPU, "--candidate-setup", f"{trainers}:absent", *arguments)

    assert "unknown function 'absent'; " in error_of(run)
    assert not (run.folder / "golden").exists()


@pytest.mark.long
def test_trainer_that_raises_in_a_step(train: RunTrain, trainers: Path) -> None:
    run = train(*CPU, "--candidate-trainer", f"{trainers}:TwoNumbers")

    assert "TwoNumbers, in step, raised RuntimeError: " in error_of(run)


@pytest.mark.long
def test_trainer_that_forgets_the_setup_function(train: RunTrain, trainers: Path) -> None:
    run = train(
        *CPU, "--candidate-trainer", f"{trainers}:Stubborn", "--candidate-setup",
        f"{trainers}:nothing",
    )  # fmt: skip

    assert "never called" in error_of(run)
