"""Whole commands on a micro model; one golden for each dtype where only the candidate matters."""

import io
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from assay import cli
from assay.runs import SilentProgress
from assay.training.check import TrainCheck, check_candidate, record_golden
from assay.training.requests import TrainOptions
from assay.verdicts import Verdict
from packages.core.tests.faults.training_corpus import PLANTS

MODEL = "micro:llama"


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def verdict(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.folder / "verdict.json").read_text())
        return record


RunTrain = Callable[..., Finished]
CheckPlant = Callable[..., Verdict]


@pytest.fixture(autouse=True, scope="session")
def waiting_threads_sleep() -> Any:
    """On a busy machine threads that spin for one another take minutes for seconds of work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "passive")
        yield


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunTrain:
    """`assay check train MODEL --reference cpu/float32 ARGUMENTS` in this process."""

    def run(*arguments: str | Path, model: str = MODEL, reference: str = "cpu/float32") -> Finished:
        folder = tmp_path / f"run-{len(list(tmp_path.glob('run-*')))}"
        texts = ["check", "train", model, "--reference", reference, *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", ["assay", *texts, "--output", str(folder)])
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
            cli.main()
        assert isinstance(end.value.code, int)
        return Finished(end.value.code, out.getvalue(), err.getvalue(), folder)

    return run


@pytest.fixture(scope="session")
def goldens(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Records the golden of a kind of training, once."""
    known: dict[tuple[str, bool], Path] = {}

    def golden(dtype: str, *, lora: bool) -> Path:
        if (dtype, lora) not in known:
            folder = tmp_path_factory.mktemp("goldens") / "golden"
            options = TrainOptions(model=MODEL, lora=lora)
            check = TrainCheck(options, "cpu/float32", f"cpu/{dtype}")
            record_golden(check, folder, SilentProgress())
            known[dtype, lora] = folder
        return known[dtype, lora]

    return golden


@pytest.fixture
def check_plant(goldens: Callable[..., Path], tmp_path: Path) -> CheckPlant:
    """The verdict over a trainer or a setup function of the corpus of faults."""

    def check(
        *, trainer: str | None = None, setup: str | None = None, dtype: str = "float32",
        lora: bool = False,
    ) -> Verdict:  # fmt: skip
        candidate = TrainCheck(
            TrainOptions(model=MODEL, lora=lora),
            "cpu/float32",
            f"cpu/{dtype}",
            trainer=f"{PLANTS / 'trainers.py'}:{trainer}" if trainer else None,
            setup=f"{PLANTS / 'setups.py'}:{setup}" if setup else None,
        )
        return check_candidate(candidate, goldens(dtype, lora=lora), tmp_path, SilentProgress())

    return check
