"""`assay check train --overfit`: clean trainers memorize a few sequences, planted ones do not."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from assay.runs import SilentProgress
from assay.training.overfit.check import check_overfit_candidate, overfit_options, record_overfit
from assay.training.reports import TrainCheck, TrainOptions
from assay.verdicts import Outcome, Verdict
from packages.core.tests.subsystem.training.conftest import MODEL, RunTrain

PLANTS = Path(__file__).with_name("overfit_plants.py")

# Sequences that are learned in few enough steps for a test: to 0.01 nats, of 2.3.
SEED, STEPS = 2, 30

Overfit = Callable[..., Verdict]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, TrainOptions], Path]:
    """Has the reference overfit, once for each kind of training."""
    known: dict[tuple[str, str], Path] = {}

    def reference(dtype: str, options: TrainOptions) -> Path:
        key = dtype, options.model_dump_json()
        if key not in known:
            known[key] = tmp_path_factory.mktemp("overfit") / "golden"
            check = TrainCheck(options, "cpu/float32", f"cpu/{dtype}")
            record_overfit(check, known[key], SilentProgress())
        return known[key]

    return reference


@pytest.fixture
def overfit(references: Callable[[str, TrainOptions], Path], tmp_path: Path) -> Overfit:
    """The verdict over a trainer: a name, or a class of the plants."""

    def check(
        trainer: str | None = None, *, dtype: str = "float32", lora: bool = False,
        mesh: Mapping[str, int] | None = None,
    ) -> Verdict:  # fmt: skip
        plain = TrainOptions(model=MODEL, lora=lora, seed=SEED)
        options = overfit_options(plain, STEPS, None)
        plant = trainer is not None and trainer[0].isupper()
        candidate = TrainCheck(
            options,
            "cpu/float32",
            f"cpu/{dtype}",
            trainer=f"{PLANTS}:{trainer}" if plant else trainer,
            mesh=mesh or {},
        )
        golden = references(dtype, options)
        return check_overfit_candidate(candidate, golden, tmp_path, SilentProgress())

    return check


def reason_of(verdict: Verdict) -> str:
    return verdict.levels["overfit"].reason or ""


def test_clean_trainer_passes_and_leaves_both_curves(overfit: Overfit, tmp_path: Path) -> None:
    verdict = overfit()

    assert verdict.verdict is Outcome.PASS, reason_of(verdict)
    assert list(verdict.levels) == ["overfit"]
    level = verdict.levels["overfit"].model_extra or {}
    assert level["steps"] == STEPS
    assert level["final_loss"] < level["target"] < level["first_loss"] / 10
    lines = (tmp_path / "measurements.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    curve = [row for row in rows if row["statistic"] == "candidate-loss"]
    assert [row["step"] for row in curve] == list(range(STEPS))
    assert curve[0]["actual"] == pytest.approx(level["first_loss"], rel=1e-5)
    assert curve[-1]["expected"] < level["target"]
    assert len([row for row in rows if row["statistic"] == "noise-grad-norm"]) == STEPS


@pytest.mark.long
def test_clean_bfloat16_passes(overfit: Overfit) -> None:
    verdict = overfit(dtype="bfloat16")

    assert verdict.verdict is Outcome.PASS, reason_of(verdict)


@pytest.mark.long
def test_clean_ranks_pass(overfit: Overfit) -> None:
    verdict = overfit("fsdp", mesh={"dp": 2})

    assert verdict.verdict is Outcome.PASS, reason_of(verdict)


@pytest.mark.parametrize(
    ("trainer", "diagnosis", "phase", "reason"),
    [
        ("LearningRateOfZero", "frozen-parameters", "optimizer", "no step changes a bit"),
        ("StopsEarly", "optimizer-update", "optimizer", "after 30 steps its loss is"),
        ("LabelsShiftedTwice", "inputs-differ", "inputs", "the label after the next one"),
        ("LearnsPadding", "inputs-differ", "inputs", "the padding, which is masked out"),
        ("HidesThatItLearnsPadding", "inputs-differ", "inputs", "the padding, which is masked"),
        ("LearnsThePrompt", "inputs-differ", "inputs", "the prompt, whose labels are masked"),
        ("TrainsACopy", "inputs-differ", "inputs", "its weights give"),
        ("Diverges", "non-finite", "forward", "the loss of step 5 is nan"),
    ],
)
def test_trainer_that_does_not_learn_what_it_should_fails(
    overfit: Overfit, trainer: str, diagnosis: str, phase: str, reason: str
) -> None:
    verdict = overfit(trainer)

    assert verdict.verdict is Outcome.FAIL
    assert reason in reason_of(verdict)
    assert verdict.diagnosis == diagnosis
    assert verdict.location is not None
    assert verdict.location.phase == phase


def test_parameter_that_is_never_changed_is_named(overfit: Overfit) -> None:
    verdict = overfit("HalfOfTheParametersFrozen")

    assert verdict.verdict is Outcome.FAIL
    assert verdict.diagnosis == "frozen-parameters"
    assert verdict.location is not None
    assert verdict.location.phase == "optimizer"
    assert verdict.location.parameter == "model.layers.0.mlp.down_proj.weight"
    assert reason_of(verdict).startswith("19 of 39 parameters are never changed: ")


@pytest.mark.long
def test_half_of_the_parameters_frozen_is_found_in_bfloat16(overfit: Overfit) -> None:
    verdict = overfit("HalfOfTheParametersFrozen", dtype="bfloat16")

    assert verdict.verdict is Outcome.FAIL
    assert verdict.diagnosis == "frozen-parameters"


@pytest.mark.long
def test_adapter_is_learned(overfit: Overfit) -> None:
    verdict = overfit(lora=True)

    assert verdict.verdict is Outcome.PASS, reason_of(verdict)


def test_adapter_that_is_not_attached_fails(overfit: Overfit) -> None:
    verdict = overfit("AdapterNotAttached", lora=True)

    assert verdict.verdict is Outcome.FAIL
    assert reason_of(verdict) == "nothing is trained: no step changes a bit of the adapter"


@pytest.mark.long
def test_reference_that_does_not_overfit_is_not_compared(train: RunTrain) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    options = ("--overfit", "--overfit-steps", "10", "--track", "tensorboard", "--json")
    run = train("--candidate", "cpu/float32", *options)

    assert run.code == 3, run.stderr
    verdict = json.loads(run.stdout)
    assert verdict == run.verdict
    level = verdict["levels"]["overfit"]
    assert level["verdict"] == "NOT_COMPARED"
    assert "in 10 steps the reference itself gets from 16.9 to" in level["reason"]
    assert 'data-chart="loss"' in (run.folder / "report.html").read_text()
    tracked = [path.name for path in (run.folder / "tensorboard").iterdir()]
    assert sorted(tracked) == ["exact-reference", "noise"]
    # Whoever has learned nothing has nothing to hold a candidate to: none was run.
    assert not (run.folder / "candidate").exists()
