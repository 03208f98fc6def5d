"""Whole cycles on a micro model: a clean one, and one for each planted fault."""

import math
from pathlib import Path
from typing import Literal

import pytest
import torch

from assay.runs import SilentProgress
from assay.verdicts import Location, Outcome, Verdict
from assay_smoke.judging import judge_cycle
from assay_smoke.planning import plan_smoke
from assay_smoke.reports import PartReport, PartRequest
from assay_smoke.worker import run_part

PLANTED = Path(__file__).parents[1] / "planted_trainers.py"
CYCLE = plan_smoke("cpu/float32", "micro:llama", None).cycles[0]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def run(
    part: Literal["uninterrupted", "resumed"], folder: Path, trainer: str | None = None
) -> PartReport:
    asked = PartRequest(
        part=part,
        cycle=CYCLE.model_copy(update={"trainer": trainer}),
        checkpoint=str(folder / "checkpoint"),
        output=str(folder / "checkpoint-end"),
    )
    return run_part(asked, SilentProgress())


def verdict_on(trainer: str, folder: Path) -> Verdict:
    uninterrupted = run("uninterrupted", folder, trainer)
    verdict, _ = judge_cycle(CYCLE, uninterrupted, run("resumed", folder, trainer))
    return verdict


def test_a_clean_cycle_passes_with_every_level_compared(tmp_path: Path) -> None:
    uninterrupted = run("uninterrupted", tmp_path)
    resumed = run("resumed", tmp_path)
    assert [step.step for step in uninterrupted.steps] == [0, 1, 2, 3]
    assert resumed.steps == uninterrupted.steps[2:]
    assert all(math.isfinite(step.loss) for step in uninterrupted.steps)
    # Two matrices for each of seven linear layers in each of four layers.
    assert len(uninterrupted.trainable) == 56
    assert len(uninterrupted.adapter_on_disk) == 56
    # Three values of AdamW for each trainable tensor are part of the state.
    assert sum(path.startswith("optimizer.state.") for path in resumed.at_checkpoint) == 3 * 56
    verdict, measurements = judge_cycle(CYCLE, uninterrupted, resumed)
    assert verdict.verdict is Outcome.PASS
    assert {name: level.verdict for name, level in verdict.levels.items()} == dict.fromkeys(
        ["loss", "updates", "adapter", "checkpoint", "resume"], Outcome.PASS
    )
    assert all(level.compared for level in verdict.levels.values())
    assert [(row.port, row.step, row.ratio) for row in measurements] == [
        ("number of tokens", 2, 0.0),
        ("loss", 2, 0.0),
        ("gradient norm", 2, 0.0),
        ("number of tokens", 3, 0.0),
        ("loss", 3, 0.0),
        ("gradient norm", 3, 0.0),
    ]


@pytest.mark.parametrize(
    ("name", "level", "diagnosis", "location"),
    [
        (
            "MomentsDropped",
            "checkpoint",
            "checkpoint-mismatch",
            Location(phase="checkpoint", step=2, parameter="optimizer.state.0.exp_avg"),
        ),
        (
            "StepCountReset",
            "checkpoint",
            "checkpoint-mismatch",
            Location(phase="checkpoint", step=2, parameter="optimizer.state.0.step"),
        ),
        (
            "GeneratorsNotRestored",
            "checkpoint",
            "rng-state",
            Location(phase="checkpoint", step=2, parameter="generators.torch"),
        ),
        ("DrawsAfterLoading", "resume", "rng-state", Location(phase="checkpoint", step=2)),
        (
            "AdapterSavedWithSizeZero",
            "adapter",
            "adapter-mismatch",
            Location(
                phase="checkpoint",
                step=2,
                parameter="model.layers.0.mlp.down_proj.lora_A.weight",
            ),
        ),
        (
            "AdapterSavedWithoutTensors",
            "adapter",
            "adapter-mismatch",
            Location(
                phase="checkpoint",
                step=2,
                parameter="model.layers.0.mlp.down_proj.lora_A.weight",
            ),
        ),
        (
            "AdapterNotSaved",
            "adapter",
            "adapter-mismatch",
            Location(
                phase="checkpoint",
                step=2,
                parameter="model.layers.0.mlp.down_proj.lora_A.weight",
            ),
        ),
        (
            "OneTensorSavedAsZeros",
            "adapter",
            "adapter-mismatch",
            Location(
                phase="checkpoint",
                step=2,
                parameter="model.layers.0.mlp.down_proj.lora_B.weight",
            ),
        ),
        (
            "ParametersFrozen",
            "updates",
            "frozen-parameters",
            Location(
                phase="optimizer",
                step=4,
                parameter="model.layers.0.mlp.down_proj.lora_A.default.weight",
            ),
        ),
        (
            "BaseNotFrozen",
            "updates",
            "optimizer-update",
            Location(phase="optimizer", step=4, parameter="lm_head.weight"),
        ),
        ("LossIsNaN", "loss", "non-finite", Location(phase="forward", step=0)),
    ],
)
def test_a_planted_fault_fails_with_its_cause(
    tmp_path: Path, name: str, level: str, diagnosis: str, location: Location
) -> None:
    verdict = verdict_on(f"{PLANTED}:{name}", tmp_path)
    assert verdict.verdict is Outcome.FAIL
    failed = [name for name, found in verdict.levels.items() if found.verdict is Outcome.FAIL]
    assert failed[0] == level
    assert verdict.diagnosis == diagnosis
    assert verdict.location == location
