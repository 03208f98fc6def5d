"""What training does not reach: NOT_COMPARED with its name."""

from pathlib import Path

import pytest

from packages.core.tests.subsystem.commands import Finished, run_in_process
from packages.core.tests.subsystem.generate.unreached_models import (
    UNREACHED,
    save_llama,
    save_model_with_heads,
)

pytestmark = pytest.mark.long

RUNS = ("--reference", "cpu/float32", "--candidate", "cpu/float32")


def check_train(folder: Path, *arguments: str | Path) -> Finished:
    return run_in_process(folder, "check", "train", *arguments, *RUNS, "--steps", "2")


def test_experts_without_input_are_named(tmp_path: Path) -> None:
    unreached = UNREACHED["deepseek_v3 with an expert that is never chosen"]

    run = check_train(tmp_path / "run", unreached.save(tmp_path / "model"))

    assert run.code == 3, run.stderr
    coverage = run.verdict["coverage"]
    assert (*coverage["not_run_parts"], *coverage["unrouted_experts"]) == unreached.parts
    assert coverage["unused_parameters"] == []


@pytest.mark.parametrize("name", ["qwen2_vl", "mllama"])
def test_images_in_texts_reach_every_module(name: str, tmp_path: Path) -> None:
    run = check_train(tmp_path / "run", UNREACHED[name].save(tmp_path / "model"))

    assert not run.verdict["coverage"]["not_run_parts"], run.stdout
    assert {level["verdict"] for level in run.verdict["levels"].values()} == {"PASS", None}


def test_unused_heads_are_allowed_by_name(tmp_path: Path) -> None:
    model = save_model_with_heads(tmp_path / "model")
    trusted = ("--trust-remote-code", "--allow-unused", "mtp", "--allow-unused", "value_head")

    unsure = check_train(tmp_path / "unsure", model, *trusted)
    passed = check_train(tmp_path / "passed", model, *trusted, "--allow-unused", "logit_scale")

    assert (unsure.code, passed.code) == (3, 0)
    assert unsure.verdict["coverage"]["unused_parameters"] == ["logit_scale"]
    assert passed.stdout.splitlines()[1].startswith("What ran of the model agrees")


@pytest.mark.parametrize("options", [(), ("--lora",), ("--mesh", "pp=2")])
def test_a_plain_model_is_covered_whole(options: tuple[str, ...], tmp_path: Path) -> None:
    run = check_train(tmp_path / "run", save_llama(tmp_path / "model"), *options)

    coverage = run.verdict["coverage"]
    assert run.code == 0, run.stdout
    assert coverage["modules_run"] == coverage["modules"]
    assert coverage["candidate_modules_run"] == coverage["candidate_modules"]
    assert (coverage["unused_parameters"], coverage["unrouted_experts"]) == ([], [])


def test_overfitting_covers_the_same_parts(tmp_path: Path) -> None:
    model = save_model_with_heads(tmp_path / "model")
    overfit = (
        "check", "train", model, *RUNS, "--trust-remote-code", "--overfit", "--overfit-steps", "60",
        "--learning-rate", "0.01", "--allow-unused", "mtp", "--allow-unused", "value_head",
    )  # fmt: skip

    unsure = run_in_process(tmp_path / "unsure", *overfit)
    passed = run_in_process(tmp_path / "passed", *overfit, "--allow-unused", "logit_scale")

    assert (unsure.code, passed.code) == (3, 0), unsure.stdout + passed.stdout
    assert unsure.verdict["levels"]["overfit"]["verdict"] == "PASS"
    assert unsure.verdict["coverage"]["unused_parameters"] == ["logit_scale"]
    assert passed.stdout.splitlines()[1].startswith("What ran of the model agrees")
