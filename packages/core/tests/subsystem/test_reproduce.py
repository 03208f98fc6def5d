"""`assay reproduce`: faults that were planted in generation and training fail with torch alone."""

import json
import shutil
from pathlib import Path

import pytest

from assay.models import resolve_model
from packages.core.tests.faults.published.models import make_model
from packages.core.tests.faults.published.test_loads import CHAT, under_new_name, with_template
from packages.core.tests.subsystem.commands import error_of, run_alone, run_in_process

# A check and its reproduction start ten processes that import torch.
pytestmark = pytest.mark.timeout(600)

FAULTS = Path("packages/core/tests/faults").resolve()
CHECK = ("--reference", "cpu/float32", "--candidate")


@pytest.mark.parametrize(
    ("candidate", "kind", "option", "plant", "shown"),
    [
        ("sim/bfloat16", "generate", "setup", "plants/attention.py:scale_2_percent", "0.4562"),
        pytest.param(
            "cpu/float32",
            "train",
            "trainer",
            "training_plants/conventions.py:DecaysWhileSkipping",
            't["actual"]',
            marks=pytest.mark.long,
        ),
        *(
            pytest.param("cpu/bfloat16", *fault, marks=pytest.mark.long)
            for fault in (
                ("generate", "setup", "plants/attention.py:scale_2_percent", "scale=0.2082"),
                ("generate", "setup", "plants/masks.py:future_token_seen", "add(v4, 1)"),
                ("generate", "setup", "plants/generation.py:token_before_repeated", "-2, -1"),
                ("train", "setup", "training_plants/setups.py:value_head_detached", "slice"),
                ("train", "trainer", "training_plants/trainers.py:TwiceTheLearningRate", "=-0.02"),
                ("train", "trainer", "training_plants/trainers.py:OneTensorSavedAsZeros", "zeros"),
            )
        ),
    ],
)
def test_a_planted_fault_fails_by_itself(
    tmp_path: Path, candidate: str, kind: str, option: str, plant: str, shown: str
) -> None:
    planted = f"--candidate-{option}", f"{FAULTS}/{plant}"
    run = run_in_process(
        tmp_path / "run", "check", kind, "micro:llama", *CHECK, candidate, *planted
    )
    assert run.code == 1, run.stderr

    made = run_in_process(tmp_path / "alone", "reproduce", tmp_path / "run")

    script = tmp_path / "alone/reproduce.py"
    assert (made.code, made.stdout) == (0, f"python {script}\n"), made.stderr
    names = {"run.json", "reproduce.py", "tensors.pt", "README.md", "environment.json"}
    assert {path.name for path in script.parent.iterdir() if path.suffix != ".log"} == names
    assert (script.parent / "tensors.pt").stat().st_size < 2**20
    code, output = run_alone(script)
    assert (code, output.splitlines()[-1][:5]) == (1, "FAIL:")
    code, output = run_alone(script, "--reference")
    assert (code, output.splitlines()[-1]) == (0, "PASS")
    lines = script.read_text().splitlines()
    assert len(lines) < 120
    start = lines.index(next(line for line in lines if line.startswith("def compute(")))
    assert any(shown in line for line in lines[start:] if line.startswith(" " * 8))


@pytest.mark.long
def test_an_exchange_of_ranks_fails_by_itself(tmp_path: Path) -> None:
    plant = f"{FAULTS}/training_plants/ranks.py:FirstRankForAll"
    planted = "cpu/float32", "--candidate-trainer", plant, "--mesh", "dp=2"
    run = run_in_process(tmp_path / "run", "check", "train", "micro:llama", *CHECK, *planted)
    assert run.code == 1, run.stderr

    made = run_in_process(tmp_path / "alone", "reproduce", tmp_path / "run")

    assert made.code == 0, made.stderr
    script = tmp_path / "alone/reproduce.py"
    assert ".broadcast(" in script.read_text()
    assert [run_alone(script, *options)[0] for options in ((), ("--reference",))] == [1, 0]


_ROUNDED = """
import torch
from transformers import LlamaForCausalLM


class Rounded(LlamaForCausalLM):
    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        weight = model.model.layers[1].mlp.up_proj.weight.data
        weight[3] = weight[3].to(torch.float8_e4m3fn).to(weight.dtype)
        return loaded
"""


def test_a_weight_that_is_loaded_wrongly_fails_beside_the_bytes_of_its_file(
    tmp_path: Path,
) -> None:
    source, model = resolve_model("micro:llama").recipe, tmp_path / "model"
    assert source is not None
    shutil.copytree(source.folder, model)
    (model / "rounded.py").write_text(_ROUNDED)
    settings = json.loads((model / "config.json").read_text())
    own = {"architectures": ["Rounded"], "auto_map": {"AutoModelForCausalLM": "rounded.Rounded"}}
    (model / "config.json").write_text(json.dumps(settings | own))
    run = run_in_process(tmp_path / "run", "check", "load", model, "--trust-remote-code")
    assert run.code == 1, run.stderr

    made = run_in_process(tmp_path / "alone", "reproduce", tmp_path / "run")

    script = tmp_path / "alone/reproduce.py"
    assert (made.code, made.stdout) == (0, f"python {script}\n"), made.stderr
    code, output = run_alone(script)
    assert code == 1
    assert "FAIL: model.layers.1.mlp.up_proj.weight is wrong" in output
    assert run_alone(script, "--reference") == (0, "PASS\n")


def test_a_setting_that_is_not_read_fails_by_its_numbers(tmp_path: Path) -> None:
    model = Path(make_model("llama, theta 500000", tmp_path / "model"))
    under_new_name(model)
    assert run_in_process(tmp_path / "run", "check", "load", model).code == 1

    made = run_in_process(tmp_path / "alone", "reproduce", tmp_path / "run")

    script = tmp_path / "alone/reproduce.py"
    assert (made.code, made.stdout) == (0, f"python {script}\n"), made.stderr
    code, output = run_alone(script)
    assert code == 1
    assert "FAIL: config.json: rope_params is wrong" in output
    assert "expected 500000.0" in output
    assert run_alone(script, "--reference") == (0, "PASS\n")


def test_a_chat_that_begins_twice_is_refused_with_the_reason_of_the_verdict(tmp_path: Path) -> None:
    model = Path(make_model("llama, theta 500000", tmp_path / "model"))
    with_template("{{ bos_token }}" + CHAT)(model)
    run = run_in_process(tmp_path / "run", "check", "load", model)
    assert run.code == 1, run.stderr

    made = run_in_process(tmp_path / "alone", "reproduce", tmp_path / "run")

    assert "chat" in error_of(made)
    assert not (tmp_path / "alone").exists()


def test_a_run_that_passed_is_refused(tmp_path: Path) -> None:
    run = run_in_process(tmp_path / "run", "check", "load", "micro:llama")
    assert run.code == 0
    refused = run_in_process(tmp_path / "alone", "reproduce", tmp_path / "run")
    assert "only a FAIL can be reproduced" in error_of(refused)
    assert not (tmp_path / "alone").exists()
