"""The command `assay bench tune`, interrupted twice."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from packages.core.tests.subsystem.commands import run_command

# Two tunings take 15 s on an idle machine.
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

STEPS, CHECKPOINT_EVERY = 40, 6

RECIPE = f"""
models = ["micro:llama"]
run = "cpu/float32"
seeds = [0]
steps = {STEPS}
batch_size = 4
sequence_length = 32
checkpoint_every = {CHECKPOINT_EVERY}

[[data]]
source = "sums"
share = 3

[[data]]
source = "own.jsonl"

[permutations.full]
learning_rate = 3e-3

[permutations.lora]
features = ["lora"]
learning_rate = 1e-2
"""

FULL, LORA = "micro-llama/full/seed-0", "micro-llama/lora/seed-0"


def command(recipe: Path, output: Path) -> list[str]:
    return ["bench", "tune", str(recipe), "--output", str(output), "--json"]


def judged(recipe: Path, output: Path) -> tuple[int, dict[str, Any]]:
    done = run_command(*command(recipe, output))
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def interrupt(recipe: Path, output: Path, tuning: str, number: signal.Signals) -> None:
    """Interrupt the command after the first checkpoint of `tuning`."""
    losses = output / tuning / "losses.jsonl"
    with subprocess.Popen(
        [sys.executable, "-m", "assay.cli", *command(recipe, output)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        while process.poll() is None:
            if losses.is_file() and losses.read_bytes().count(b"\n") > CHECKPOINT_EVERY:
                process.send_signal(number)
                break
            time.sleep(0.005)
    assert process.returncode in (-number, 128 + number)
    assert not (output / tuning / "tuning.json").exists()


def steps_of(output: Path, tuning: str) -> list[dict[str, Any]]:
    """The lines of losses.jsonl, without durations."""
    lines = (output / tuning / "losses.jsonl").read_text(encoding="utf-8").splitlines()
    return [{**json.loads(line), "seconds": None} for line in lines]


def record_of(output: Path, tuning: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((output / tuning / "tuning.json").read_bytes())
    return record


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    documents = (f"line {number}\nof a document of {number} words" for number in range(100))
    lines = (json.dumps({"text": document}) + "\n" for document in documents)
    (folder / "own.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    return folder / "recipe.toml"


def test_interrupted_tuning_continues_with_equal_losses(recipe: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    code, verdict = judged(recipe, whole)
    assert (code, verdict["verdict"]) == (0, "PASS"), verdict["levels"]

    interrupt(recipe, parts, FULL, signal.SIGTERM)
    interrupt(recipe, parts, LORA, signal.SIGKILL)
    finished = (parts / FULL / "tuning.json").stat().st_mtime_ns
    code, verdict = judged(recipe, parts)
    assert (code, verdict["verdict"]) == (0, "PASS"), verdict["levels"]
    assert (parts / FULL / "tuning.json").stat().st_mtime_ns == finished

    for tuning in (FULL, LORA):
        assert len(steps_of(whole, tuning)) == STEPS
        assert steps_of(parts, tuning) == steps_of(whole, tuning)
        expected, actual = record_of(whole, tuning), record_of(parts, tuning)
        assert actual["end"] == expected["end"]
        assert expected["start"]["weights_hash"] != expected["end"]["weights_hash"]
        model = AutoModelForCausalLM.from_pretrained(parts / tuning / "model")
        assert model.num_parameters() > 100_000
        assert not (parts / tuning / "checkpoints").exists()
    assert (parts / LORA / "adapter" / "adapter_config.json").is_file()

    recipe.write_text(RECIPE.replace("3e-3", "4e-3"), encoding="utf-8")
    done = run_command(*command(recipe, parts))
    assert done.returncode == 2
    assert done.stderr.startswith(f"assay: {parts} holds tunings of another recipe")
