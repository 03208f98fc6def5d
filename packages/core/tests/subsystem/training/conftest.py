"""Whole commands on a micro model; one golden for each dtype where only the candidate matters."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from assay.runs import SilentProgress
from assay.training.check import check_candidate, options_for, record_golden
from assay.training.reports import TrainCheck, TrainOptions
from assay.verdicts import Verdict
from packages.core.tests.faults.training_corpus import PLANTS
from packages.core.tests.subsystem.commands import Finished, run_in_process

MODEL = "micro:llama"


RunTrain = Callable[..., Finished]
CheckPlant = Callable[..., Verdict]


@pytest.fixture
def train(tmp_path: Path) -> RunTrain:
    """`assay check train MODEL --reference cpu/float32 ARGUMENTS`."""

    def run(*arguments: str | Path, model: str = MODEL, reference: str = "cpu/float32") -> Finished:
        folder = tmp_path / f"run-{len(list(tmp_path.glob('run-*')))}"
        return run_in_process(folder, "check", "train", model, "--reference", reference, *arguments)

    return run


@pytest.fixture(scope="session")
def goldens(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Records the golden of a kind of training, once."""
    known: dict[tuple[str, str], Path] = {}

    def golden(dtype: str, options: TrainOptions) -> Path:
        key = dtype, options.model_dump_json()
        if key not in known:
            known[key] = tmp_path_factory.mktemp("goldens") / "golden"
            check = TrainCheck(options, "cpu/float32", f"cpu/{dtype}")
            record_golden(check, known[key], SilentProgress())
        return known[key]

    return golden


@pytest.fixture
def check_plant(goldens: Callable[..., Path], tmp_path: Path) -> CheckPlant:
    """The verdict over a trainer or a setup function of the corpus of faults."""

    def check(
        *, trainer: str | None = None, setup: str | None = None, dtype: str = "float32",
        lora: bool = False, mesh: Mapping[str, int] | None = None, features: Sequence[str] = (),
    ) -> Verdict:  # fmt: skip
        options = options_for(TrainOptions(model=MODEL, lora=lora), mesh or {}, features)
        candidate = TrainCheck(
            options,
            "cpu/float32",
            f"cpu/{dtype}",
            trainer=_trainer(trainer),
            setup=_setup(setup),
            mesh=mesh or {},
            features=tuple(features),
        )
        return check_candidate(candidate, goldens(dtype, options), tmp_path, SilentProgress())

    return check


def _setup(name: str | None) -> str | None:
    """A function among the plants, or FILE.py:FUNC as it is."""
    is_plant = name is not None and ":" not in name
    return f"{PLANTS / 'setups.py'}:{name}" if is_plant else name


def _trainer(name: str | None) -> str | None:
    """A name that `assay check train` knows, or a class among the plants."""
    plant = name is not None and name[0].isupper()
    return f"{PLANTS / 'trainers.py'}:{name}" if plant else name
