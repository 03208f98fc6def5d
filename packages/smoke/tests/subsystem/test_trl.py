"""TRL's SFTTrainer, checked phase by phase: it passes, and faulty variants fail."""

import importlib
import sys
from pathlib import Path

import pytest

import assay
from assay.errors import UsageError
from assay.verdicts import Outcome, Verdict

PLANTED = Path(__file__).parents[1] / "planted_trl.py"
TRL = "assay_smoke.trainers.trl"


def check(trainer: str, dtype: str, folder: Path, num_ranks: int = 1) -> Verdict:
    return assay.check_train(
        "micro:llama",
        reference="cpu/float32",
        candidate=f"cpu/{dtype}",
        candidate_trainer=trainer,
        mesh=f"dp={num_ranks}" if num_ranks > 1 else None,
        micro_batches=2 * num_ranks,
        steps=2,
        resume_at=1,
        output=folder,
    )


@pytest.mark.long
def test_it_trains_on_two_ranks_as_the_reference_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)

    verdict = check("trl", "bfloat16", tmp_path / "run", num_ranks=2)

    assert verdict.verdict is Outcome.PASS, verdict.levels
    compared = {name for name, level in verdict.levels.items() if level.compared}
    assert compared == {
        "load", "inputs", "loss", "activations", "gradients", "updates", "replicas", "checkpoint"
    }  # fmt: skip
    assert "declared absent, or of no effect; not measured: (model):output.logits" in verdict.notes
    assert "the loss is scaled by 2, taken off in backward" in verdict.notes
    assert list(here.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("trainer", "dtype", "phase", "diagnosis"),
    [
        ("LastMicroBatchOnly", "bfloat16", "backward", "missing-reduction"),
        ("ClipsBeforeUnscaling", "bfloat16", "clip", "clip-norm"),
        ("MeanOfMeans", "float32", "forward", "loss-scale"),
    ],
)
def test_a_planted_fault_fails_by_its_name(
    tmp_path: Path, trainer: str, dtype: str, phase: str, diagnosis: str
) -> None:
    verdict = check(f"{PLANTED}:{trainer}", dtype, tmp_path / "run")

    assert verdict.verdict is Outcome.FAIL
    assert verdict.diagnosis == diagnosis
    assert verdict.location is not None
    assert verdict.location.phase == phase


def test_without_trl_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, TRL, raising=False)

    with pytest.raises(UsageError, match=r"needs TRL: pip install 'assay-smoke\[trl\]'"):
        importlib.import_module(TRL)
