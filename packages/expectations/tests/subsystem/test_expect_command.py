"""The command `assay expect`."""

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from assay.models import RECIPES
from assay_expectations.records import read_expectation
from assay_expectations.verdict import SHIPPED
from packages.core.tests.subsystem.commands import run_command

FAULTS = """
import torch

def scale(model):
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight *= 1.0002
    return model

def scale_norm(model):
    with torch.no_grad():
        model.bert.encoder.layer[1].output.LayerNorm.weight *= 1.001
    return model

def poison(model):
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    return model

def refuse(model):
    if model.dtype != torch.bfloat16:
        raise TypeError("expected half")
    return model

def leave(model):
    return model
"""


def assay(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("expect", *arguments)


def verify(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    done = assay("verify", *arguments, "--output", str(folder), "--json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captured")
    done = assay("capture", "micro:llama", "--run", "cpu/float32", "--output", str(folder))
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    assert path.parent == folder
    return path


@pytest.fixture(scope="module")
def captured_in_half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("captured") / "e.json"
    output = ("--run", "cpu/bfloat16", "--captures", "2", "--output", str(file))
    done = assay("capture", "micro:llama", *output)
    assert done.returncode == 0, done.stderr
    return file


def test_unknown_device_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    done = assay("verify", "--run", "cpuu/float32", "--output", str(tmp_path / "run"))
    assert done.returncode == 2
    assert done.stderr.startswith("assay: unknown device 'cpuu'; there is: cpu, ")
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_new_capture_passes(captured: Path, tmp_path: Path) -> None:
    code, verdict = verify(tmp_path / "run", str(captured))
    assert (code, verdict["verdict"]) == (0, "PASS")
    # Four prompts with 16 tokens each and a long one with 4.
    assert verdict["compared"] == 68
    assert verdict["noise_ratio"] == pytest.approx(1.0, rel=0.3)


def test_capture_has_key_and_provenance(captured: Path) -> None:
    expectation = read_expectation(captured)
    machine, content = expectation.key.machine, expectation.key.content
    assert (machine.vendor, machine.architecture) == ("cpu", platform.machine())
    assert content.weights["lm_head.weight"].shape == [260, 96]
    assert expectation.provenance.versions == {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    assert len(expectation.captures) == 3
    process = expectation.provenance.process
    assert {"tokenizers", "jinja2"} <= process["versions"].keys()
    assert "num_threads" not in process
    assert expectation.provenance.torch_settings["num_threads"] == 1
    assert len(expectation.signature.top_ids[0][0][0]) == 8
    assert len(expectation.signature.yardstick.log_probabilities[0][0][0]) == 9


@pytest.mark.parametrize(
    ("fault", "diagnosis", "module"),
    [
        ("scale", "module-error", "model.layers.1.mlp.down_proj"),
        ("poison", "non-finite", "lm_head"),
    ],
)
def test_a_planted_fault_is_found_at_its_place(
    captured: Path, tmp_path: Path, fault: str, diagnosis: str, module: str
) -> None:
    setup = tmp_path / "faults.py"
    setup.write_text(FAULTS)
    code, verdict = verify(tmp_path / "run", str(captured), "--candidate-setup", f"{setup}:{fault}")
    assert (code, verdict["verdict"], verdict["diagnosis"]) == (1, "FAIL", diagnosis)
    assert verdict["location"]["module"] == module
    (level,) = verdict["levels"].values()
    assert level["drift"]["answer"] == "run"


@pytest.mark.long
def test_model_that_does_not_generate_is_verified(tmp_path: Path) -> None:
    captures = ("--captures", "2", "--output", str(tmp_path / "e"))
    done = assay("capture", "micro:bert", "--run", "cpu/float32", *captures)
    assert done.returncode == 0, done.stderr
    setup = tmp_path / "faults.py"
    setup.write_text(FAULTS)
    clean, scaled = (
        verify(tmp_path / name, str(tmp_path / "e"), *arguments)
        for name, arguments in (
            ("clean", []),
            ("scaled", ["--candidate-setup", f"{setup}:scale_norm"]),
        )
    )
    assert (clean[0], scaled[0]) == (0, 1)
    # At most 16 positions of each of five prompts.
    assert clean[1]["compared"] == scaled[1]["compared"] == 80


@pytest.mark.long
def test_changed_weights_make_it_stale(captured: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(RECIPES["llama"].folder, model)
    done = assay("capture", str(model), "--run", "cpu/float32", "--output", str(tmp_path / "e"))
    assert done.returncode == 0, done.stderr
    weights = next(model.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    code, verdict = verify(tmp_path / "run", str(tmp_path / "e"))
    assert (code, verdict["verdict"]) == (1, "FAIL")
    (level,) = verdict["levels"].values()
    changed = (
        r"stale, different content: weights with different values \(1 of \d+\): model\.norm\.weight"
        r"; .*(is [\d.e,]+x the error of the captured run|the outputs on the recorded tokens are within the limits)"
    )
    assert re.match(changed, level["reason"])
    assert level["compared"] == 68


@pytest.mark.long
def test_effect_of_an_unread_tensor_is_named(captured: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(RECIPES["llama"].folder, model)
    file = model / "model.safetensors"
    save_file({**load_file(file), "extra.weight": torch.ones(3, 3)}, file, {"format": "pt"})
    code, verdict = verify(tmp_path / "run", str(captured), "--model", str(model))
    (level,) = verdict["levels"].values()
    assert code == 1
    assert level["reason"] == (
        "stale, different content: new weights (1): extra.weight; the model does not read extra.weight; the"
        " outputs on the recorded tokens are within the limits"
    )


def write_tokenizer(folder: Path, *first: str) -> None:
    """Write a tokenizer of bytes whose ids begin with those of `first`."""
    others = sorted({*ByteLevel.alphabet()} - {*first})
    vocabulary = {symbol: number for number, symbol in enumerate([*first, *others])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@pytest.mark.long
@pytest.mark.parametrize("change", ["tokenizer", "weights"])
def test_a_fault_shows_beside_stale_content(tmp_path: Path, change: str) -> None:
    model, setup = tmp_path / "model", tmp_path / "faults.py"
    shutil.copytree(RECIPES["llama"].folder, model)
    write_tokenizer(model)
    capture = ("capture", str(model), "--run", "cpu/float32", "--captures", "1")
    assert assay(*capture, "--output", str(tmp_path / "e.json")).returncode == 0
    setup.write_text(FAULTS)
    if change == "tokenizer":
        write_tokenizer(model, "e", "a")
    else:
        file = model / "model.safetensors"
        tensors = load_file(file)
        tensors["model.norm.weight"] *= 2
        save_file(tensors, file, {"format": "pt"})
    plain = verify(tmp_path / "plain", str(tmp_path / "e.json"))
    both = verify(
        tmp_path / "both", str(tmp_path / "e.json"), "--candidate-setup", f"{setup}:scale"
    )
    assert [(code, one["diagnosis"]) for code, one in (plain, both)] == [
        (1, "stale"), (1, "module-error"),
    ]  # fmt: skip
    if change == "tokenizer":
        (level,) = plain[1]["levels"].values()
        assert (
            "different built-in prompts: 3 of 5, the first is prompt 1 at its token 0"
            in level["reason"]
        )
    assert both[1]["location"]["module"] == "model.layers.1.mlp.down_proj"
    assert both[1]["headline"] == (
        "e is stale: its model or its inputs changed; besides, the run itself is wrong"
    )


@pytest.mark.long
def test_change_of_the_tokenizer_is_named(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(RECIPES["llama"].folder, model)
    write_tokenizer(model)
    capture = ("capture", str(model), "--run", "cpu/float32", "--captures", "1")
    assert assay(*capture, "--output", str(tmp_path / "e.json")).returncode == 0
    config = model / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"padding_side": "left"}))
    code, verdict = verify(tmp_path / "padding", str(tmp_path / "e.json"))
    assert (code, verdict["notes"]) == (
        0, ["e: changed since the capture: tokenizer_config.json: padding_side absent → left"],
    )  # fmt: skip
    (model / "tokenizer.json").unlink()
    code, verdict = verify(tmp_path / "gone", str(tmp_path / "e.json"))
    assert code == 1
    assert verdict["levels"]["e"]["reason"].startswith("missing tokenizer files: tokenizer.json; ")


@pytest.mark.long
@pytest.mark.parametrize(
    ("factor", "told", "answer"),
    [
        (1.0, "39 of 39 tensors in another dtype have equal values", None),
        (1.003, "38 of 39 tensors in another dtype have equal values", "none"),
    ],
)
def test_weights_saved_in_another_dtype_are_compared(
    captured: Path, tmp_path: Path, factor: float, told: str, answer: str | None
) -> None:
    model = tmp_path / "model"
    shutil.copytree(RECIPES["llama"].folder, model)
    file = model / "model.safetensors"
    tensors = {name: tensor.float() for name, tensor in load_file(file).items()}
    tensors["model.norm.weight"] *= factor
    save_file(tensors, file, {"format": "pt"})
    code, verdict = verify(tmp_path / "run", str(captured), "--model", str(model))
    (level,) = verdict["levels"].values()
    assert code == 1
    assert told in level["reason"]
    assert "(39): lm_head.weight and 38 more are F32, expected BF16" in level["reason"]
    assert level.get("drift", {}).get("answer") == answer


@pytest.mark.long
def test_chat_template_that_changes_the_prompts_makes_them_stale(tmp_path: Path) -> None:
    model, file, template = (
        tmp_path / name for name in ("model", "e.json", "model/chat_template.jinja")
    )
    shutil.copytree(RECIPES["llama"].folder, model)
    write_tokenizer(model)
    one_turn = "{% for one in messages %}<{{ one.content }}>{% endfor %}"
    template.write_text(one_turn)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc"}\n{"ids": [1, 2, 3]}\n')
    capture = (
        "capture",
        str(model),
        "--run",
        "cpu/float32",
        "--captures",
        "1",
        "--output",
        str(file),
    )
    done = assay(*capture, "--chat", "--prompts", str(prompts))
    assert done.returncode == 0, done.stderr

    template.write_text("{# the same text #}" + one_turn)
    code, verdict = verify(tmp_path / "same", str(file))
    assert (code, len(verdict["notes"])) == (0, 1)
    assert verdict["notes"][0].startswith("e: changed since the capture: chat template: hash ")

    template.write_text(one_turn.replace("<", "["))
    code, verdict = verify(tmp_path / "other", str(file))
    assert (code, verdict["diagnosis"]) == (1, "stale")
    assert verdict["levels"]["e"]["reason"].startswith(
        "stale, different content: the chat template makes different prompts: 1 of 2, the first is prompt 0 at its token"
        " 0 (both counted from 0): id 27 → 58; chat template: hash "
    )
    # The next capture repeats the chats with the template of today.
    done = assay(*capture, "--reason", "another template")
    assert done.returncode == 0, done.stderr
    assert verify(tmp_path / "again", str(file))[0] == 0


@pytest.mark.long
def test_the_next_command_runs_the_recorded_chats_and_finds_the_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(RECIPES["llama"].folder, "model")
    write_tokenizer(Path("model"), "~")
    Path("model/chat_template.jinja").write_text("{{ messages[0].content }}")
    Path("chat.jsonl").write_text('{"prompt": "one ~ two"}\n')
    capture = ("capture", "model", "--run", "cpu/float32", "--captures", "1", "--output", "e.json")
    done = assay(*capture, "--chat", "--prompts", "chat.jsonl")
    assert done.returncode == 0, done.stderr
    Path("chat.jsonl").unlink()
    Path("fault.py").write_text(
        "def setup(model):\n"
        "    def scale(_, given, output):\n"
        "        return output * (1 + 0.5 * (given[0] == 0)[..., None])\n"
        "    model.model.embed_tokens.register_forward_hook(scale)\n"
    )
    code, verdict = verify(tmp_path / "run", "e.json", "--candidate-setup", "fault.py:setup")
    assert (code, verdict["location"]["module"]) == (1, "model.embed_tokens")
    (step,) = verdict["next_steps"]
    found = run_command(*shlex.split(step["command"])[1:], "--json")
    assert found.returncode == 1, found.stderr
    assert json.loads(found.stdout)["location"]["module"] == "model.embed_tokens"

    code, verdict = verify(tmp_path / "half", "e.json", "--run", "cpu/bfloat16")
    (step,) = verdict["next_steps"]
    done = run_command(*shlex.split(step["command"])[1:], "--captures", "1")
    assert done.returncode == 0, done.stderr
    first, again = (read_expectation(Path(one)) for one in ("e.json", done.stdout.strip()))
    assert (again.prompts, again.chats) == (first.prompts, first.chats)


@pytest.mark.long
def test_different_run_is_not_compared(captured: Path, tmp_path: Path) -> None:
    code, verdict = verify(tmp_path / "run", str(captured), "--run", "cpu/bfloat16")
    assert (code, verdict["verdict"], verdict["compared"]) == (3, "NOT_COMPARED", 0)
    reason = verdict["levels"]["expectations"]["reason"]
    assert "is not verified here: it is of float32" in reason
    (step,) = verdict["next_steps"]
    assert step["command"].startswith("assay expect capture micro:llama --run cpu/bfloat16")


@pytest.mark.long
def test_shipped_expectation_passes_with_installed_software(tmp_path: Path) -> None:
    code, verdict = verify(tmp_path / "run")
    shipped = SHIPPED.glob("cpu-*-float32-*.json")
    if {read_expectation(file).key.machine.architecture for file in shipped} == {
        platform.machine()
    }:
        assert (code, verdict["verdict"]) == (0, "PASS")
    else:
        assert (code, verdict["verdict"]) == (3, "NOT_COMPARED")
        assert "architecture is " in verdict["levels"]["expectations"]["reason"]


@pytest.mark.long
def test_new_capture_agrees_with_the_shipped_one(captured: Path, tmp_path: Path) -> None:
    shipped = SHIPPED / "cpu-x86_64-float32-micro-llama.json"
    done = assay("diff", str(shipped), str(captured), "--output", str(tmp_path / "run"), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["compared"] == 68
    assert verdict["noise_ratio"] < 2.0
    assert verdict["levels"]["outputs"]["change"] in ("noise", "drift")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["capture", "micro:llama", "--run", "cpu", "--output", "x"], "'cpu' is not a run"),
        (
            [
                *("capture", "micro:llama", "micro:mistral", "--run", "cpu/float32"),
                *("--output", "x.json"),
            ],
            "x.json is a file: several models need a DIR",
        ),
        (
            [
                *("capture", "micro:llama", "--run", "cpu/float32", "--output", "x"),
                *("--reason", "TEXT"),
            ],
            "--reason TEXT, --approved-by NAME: write the reason or the name itself",
        ),
        (
            ["capture", "micro:llama", "--run", "cpu/float32", "--output", "x", "--chat"],
            "--chat is for the texts of --prompts FILE.jsonl",
        ),
        (["verify", "absent.json"], "absent.json: no such file or folder"),
    ],
)
def test_usage_error_exits_with_2_and_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = assay(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    *_, last = done.stderr.split("assay: ", 1)
    assert last.startswith(message)


@pytest.mark.long
def test_own_prompts_are_captured_and_verified_without_their_file(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one two three"}\n{"ids": [1, 2, 3, 4, 5]}\n')
    inputs = ("--prompts", str(prompts), "--max-new-tokens", "3", "--batch-size", "1")
    output = ("--output", str(tmp_path / "e.json"), "--captures", "1")
    done = assay("capture", "micro:llama", "--run", "cpu/float32", *inputs, *output)
    assert done.returncode == 0, done.stderr
    prompts.unlink()
    code, verdict = verify(tmp_path / "run", str(tmp_path / "e.json"))
    # Two prompts with three new tokens each.
    assert (code, verdict["compared"]) == (0, 6)
    again = assay("capture", "micro:llama", "--run", "cpu/float32", *output)
    assert again.returncode == 0, again.stderr
    assert "unchanged: " in again.stderr


@pytest.mark.long
@pytest.mark.parametrize("epsilon", [1e-5, 1.002e-6])
def test_changed_configuration_is_named_with_its_effect(
    captured: Path, tmp_path: Path, epsilon: float
) -> None:
    model = tmp_path / "model"
    shutil.copytree(RECIPES["llama"].folder, model)
    config = model / "config.json"
    settings = json.loads(config.read_text()) | {"rms_norm_eps": epsilon}
    config.write_text(json.dumps(settings))
    code, verdict = verify(tmp_path / "run", str(captured), "--model", str(model))
    assert (code, verdict["diagnosis"]) == (1, "stale")
    assert (verdict["noise_ratio"] > verdict["limit"]) == (epsilon == 1e-5)
    assert verdict["location"]["module"] == "model.layers.0.input_layernorm"
    (level,) = verdict["levels"].values()
    change = f"config.json: rms_norm_eps 1e-06 → {epsilon}: the exact outputs (float64) move by "
    assert level["reason"].startswith(change)
    assert (level["drift"]["answer"], "not known" in level["reason"]) == ("files", False)


@pytest.mark.parametrize(
    ("setup", "note"),
    [
        ("scale", "moves the outputs in float64 on the host, first in model.layers.1.mlp.down_proj by 2e-4"),
        ("refuse", "faults.py:refuse raised TypeError: expected half"),
        ("leave", None),
    ],
)  # fmt: skip
def test_setup_function_is_tried_in_float64(
    captured_in_half: Path, tmp_path: Path, setup: str, note: str | None
) -> None:
    faults = tmp_path / "faults.py"
    faults.write_text(FAULTS)
    arguments = ("--run", "cpu/bfloat16", "--candidate-setup", f"{faults}:{setup}")
    code, verdict = verify(tmp_path / "run", str(captured_in_half), *arguments)
    assert (code, verdict["verdict"]) == (0, "PASS")
    assert len(verdict["notes"]) == (note is not None)
    assert (note or "") in " ".join(verdict["notes"])


def verify_with_edited_library(file: Path, folder: Path, edit: str) -> tuple[int, dict[str, Any]]:
    """Verify in bfloat16 with `edit` run before any other code."""
    (folder / "sitecustomize.py").write_text(edit)
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "assay.cli", "expect", "verify", str(file)),
            *("--run", "cpu/bfloat16", "--output", str(folder / "run"), "--json"),
        ],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_edited_library_that_only_rounds_otherwise_is_noted(
    captured_in_half: Path, tmp_path: Path
) -> None:
    edit = (
        "import torch\n"
        "from transformers.models.llama.modeling_llama import LlamaRMSNorm\n"
        "def forward(self, values):\n"
        "    wide = values.to(torch.float64 if values.dtype == torch.float64 else torch.float32)\n"
        "    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)\n"
        "    return (self.weight.to(wide.dtype) * (wide * scale)).to(values.dtype)\n"
        "LlamaRMSNorm.forward = forward\n"
    )
    code, verdict = verify_with_edited_library(captured_in_half, tmp_path, edit)
    assert (code, verdict["verdict"]) == (0, "PASS")
    assert "the run is not bitwise the captured one" in " ".join(verdict["notes"])


def test_edited_library_fails_a_run_within_its_limits(
    captured_in_half: Path, tmp_path: Path
) -> None:
    edit = (
        "from transformers.models.llama.modeling_llama import LlamaMLP\n"
        "forward = LlamaMLP.forward\n"
        "LlamaMLP.forward = lambda self, values: forward(self, values) * 1.003\n"
    )
    code, verdict = verify_with_edited_library(captured_in_half, tmp_path, edit)
    assert (code, verdict["diagnosis"]) == (1, "module-error")
    assert verdict["noise_ratio"] < verdict["limit"]
    assert verdict["location"]["module"] == "model.layers.0.mlp"


def test_setup_that_patches_a_library_does_not_reach_the_reference(
    captured: Path, tmp_path: Path
) -> None:
    setup = tmp_path / "patch.py"
    setup.write_text(
        "import torch.nn.functional as F\n"
        "def install(model):\n"
        "    silu = F.silu\n"
        "    F.silu = lambda *given, **named: silu(*given, **named) * 1.001\n"
        "    torch_silu = type(model.model.layers[0].mlp.act_fn)\n"
        "    torch_silu.forward = lambda self, values: F.silu(values)\n"
        "    return model\n"
    )
    code, verdict = verify(tmp_path / "run", str(captured), "--candidate-setup", f"{setup}:install")
    (level,) = verdict["levels"].values()
    assert (code, level["drift"]["answer"]) == (1, "run")
    assert verdict["location"]["module"] == "model.layers.0.mlp.act_fn"
