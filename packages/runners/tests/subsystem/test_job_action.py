"""Another repository's job: a plain trainer with two launch lines, a collator and a model, and planted bugs.

The steps of the action `job` run as on GitHub, without its installation of assay.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[4]
ACTION = ROOT / ".github/actions/job/action.yml"
TRAINING = ROOT / "examples/plain_training"

COLLATE = """
import torch

def pad(tokenizer):
    def collate(samples):
        longest = max(len(sample["input_ids"]) for sample in samples)
        def fill(name, value):
            rows = [sample[name] + [value] * (longest - len(sample[name])) for sample in samples]
            return torch.tensor(rows)
        samples = [dict(s, attention_mask=[1] * len(s["input_ids"])) for s in samples]
        return {
            "input_ids": fill("input_ids", tokenizer.pad_token_id or 0),
            "attention_mask": fill("attention_mask", 0),
            "labels": fill("labels", -100),
        }
    return collate
"""

KERNELS = """
def install(model):
    layer = model.model.layers[1].mlp
    layer.forward = lambda x: layer.down_proj(layer.act_fn(layer.gate_proj(x)) * layer.up_proj(x))
"""

ENTRIES = """
[[generate]]
model = "micro:llama"
candidate-setup = "kernels.py:install"

[[smoke]]
case = "command:ci/train.toml"

[[smoke]]
case = "command:ci/large-batches.toml"

[[data]]
collator = "collate.py:pad"
features = "masked"

[[expectations]]
folder = "expectations"
candidate-setup = "kernels.py:install"
"""


@dataclass(frozen=True)
class Job:
    """The end of the action."""

    code: int
    summary: str
    results: dict[str, str]
    """The tag of each command's problem in junit.xml; "passed" without one."""


def run_action(folder: Path, **given: str) -> Job:
    """Run the action's last step in `folder` with these inputs."""
    action: dict[str, Any] = YAML(typ="safe").load(ACTION.read_text(encoding="utf-8"))
    inputs = {
        name: given.get(name, one.get("default", "")) for name, one in action["inputs"].items()
    }
    install, step = action["runs"]["steps"]
    assert "pip install" in install["run"]
    variables = {
        name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: inputs[found[1]], value)
        for name, value in step["env"].items()
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    summary = folder / "github-summary.md"
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        cwd=folder, check=False,
        env={**os.environ, **variables, "PATH": path, "GITHUB_STEP_SUMMARY": str(summary)},
    )  # fmt: skip
    report = folder / inputs["output"] / "junit.xml"
    results = {}
    if report.is_file():
        cases = ET.parse(report).getroot()[0]  # noqa: S314 - written by assay
        results = {case.attrib["name"]: case[0].tag if len(case) else "passed" for case in cases}
    text = summary.read_text(encoding="utf-8") if summary.is_file() else ""
    return Job(done.returncode, text, results)


def assay(folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "assay.cli", *words]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout


def make_repository(folder: Path, entries: str) -> Path:
    """Make a git repository, and let `assay init` write its files."""
    folder.mkdir()
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    assay(folder, "init", "--yes", "--machine", "box=my-box@cpu/bfloat16")
    file = folder / "assay.toml"
    text = file.read_text(encoding="utf-8")
    kept = text[: text.index("[[generate]]")]
    file.write_text(kept + entries, encoding="utf-8")
    return folder


def test_a_job_writes_its_summary_and_fails_with_its_command(tmp_path: Path) -> None:
    entries = '[[load]]\nmodel = "micro:llama"\n[[expectations]]\nfolder = "empty"\n'
    repository = make_repository(tmp_path / "repository", entries)
    (repository / "empty").mkdir()
    planned = json.loads(assay(repository, "ci", "plan", "assay:box", "--json"))
    assert [job["target"] for job in planned["jobs"]] == ["box"]
    job = run_action(repository, machine="box", tier="check")
    assert (job.code, job.results) == (0, {"check: load": "passed"})
    assert job.summary.startswith("# box: PASS\n")
    job = run_action(repository, machine="box", tier="expectations", output="runs/$(touch planted)")
    assert (job.code, job.results) == (2, {"expectations: expectations": "error"})
    assert "assay expect verify empty --run cpu/bfloat16" in job.summary
    assert not (repository / "planted").exists()


@pytest.mark.parametrize(
    ("given", "seen"),
    [("", "https://of.machine"), ("https://of.input", "https://of.input https://of.machine")],
)
def test_an_index_of_the_machine_stays(tmp_path: Path, given: str, seen: str) -> None:
    action: dict[str, Any] = YAML(typ="safe").load(ACTION.read_text(encoding="utf-8"))
    step = action["runs"]["steps"][0]
    assert step["env"]["EXTRA_INDEX"] == "${{ inputs.pip-index }}"
    assert "PIP_EXTRA_INDEX_URL" not in step["env"]
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\necho "$PIP_EXTRA_INDEX_URL" >> {tmp_path}/seen\n')
    python.chmod(0o755)
    words = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    variables = {"PIP_EXTRA_INDEX_URL": "https://of.machine", "EXTRA_INDEX": given}
    names = {"PATH": path, "VERSION": "1", "MACHINE": "box", "TIER": ""}
    subprocess.run(words, check=True, env={**os.environ, **names, **variables})
    assert set((tmp_path / "seen").read_text(encoding="utf-8").split("\n")) == {seen, ""}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('[[generate]]\nmodel = "m"\nlevl = "logits"', "assay.toml: generate: No such option: --levl; did you mean --level?"),
        ('[[train]]\nmodel = "m"\nsteps = "two"', "assay.toml: train: Invalid value"),
        ("[[smoke]]\nbudgt = '3m'", "assay.toml: smoke: No such option: --budgt; did you mean --budget?"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_found_by_the_plan(tmp_path: Path, entry: str, message: str) -> None:
    repository = make_repository(tmp_path / "repository", entry)
    with pytest.raises(subprocess.CalledProcessError) as failed:
        assay(repository, "ci", "plan", "assay:box")
    assert failed.value.returncode == 2
    assert message in failed.value.stderr


def test_the_pull_request_that_adds_the_file_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "output"
    monkeypatch.setenv("GITHUB_OUTPUT", str(output))
    assert "has no assay.toml" in assay(tmp_path, "ci", "plan")
    assert output.read_text(encoding="utf-8") == "jobs=[]\n"


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository of a trainer, with an expectation of its model on its machine."""
    root = make_repository(tmp_path_factory.mktemp("adopter") / "trainer", ENTRIES)
    shutil.copy(TRAINING / "train.py", root)
    (root / "collate.py").write_text(COLLATE, encoding="utf-8")
    (root / "kernels.py").write_text(KERNELS, encoding="utf-8")
    (root / "ci").mkdir()
    text = (
        (TRAINING / "smoke.toml").read_text(encoding="utf-8").replace('"train.py"', '"../train.py"')
    )
    (root / "ci/train.toml").write_text(text, encoding="utf-8")
    large = text.replace('name = "plain PyTorch"', 'name = "large batches"\nbatch_size = 4')
    (root / "ci/large-batches.toml").write_text(large, encoding="utf-8")
    assay(
        root,
        "expect",
        "capture",
        "micro:llama",
        "--run",
        "cpu/bfloat16",
        "--output",
        "expectations",
    )
    return root


Edit = Callable[[str], str]


def replace(old: str, new: str) -> Edit:
    def edit(text: str) -> str:
        assert text.count(old) == 1, old
        return text.replace(old, new)

    return edit


CLEAN = {
    "check: generate": "passed", "smoke: smoke-train": "passed", "smoke: smoke-large-batches": "passed",
    "smoke: data": "passed", "expectations: expectations": "passed",
}  # fmt: skip

BUGS: dict[str, tuple[str, Edit, str]] = {
    "a scaled projection": (
        "kernels.py", replace("layer.up_proj(x))", "layer.up_proj(x)) * 1.02"), "check: generate",
    ),
    "an optimizer that is not restored": (
        "train.py", replace('        optimizer.load_state_dict(state["optimizer"])\n', ""),
        "smoke: smoke-train",
    ),
    "only the last micro-batch counts": (
        "train.py", replace("            loss.backward()", "            optimizer.zero_grad(); loss.backward()"),
        "smoke: smoke-train",
    ),
    "frozen parameters that one launch line trains": (
        "ci/large-batches.toml", replace('    "--freeze", "model.embed_tokens",\n', ""),
        "smoke: smoke-large-batches",
    ),
    "labels at padding": ("collate.py", replace("-100", "tokenizer.pad_token_id or 0"), "smoke: data"),
    "another model than was captured": (
        "assay.toml", replace('[[expectations]]\nfolder = "expectations"\ncandidate-setup = "kernels.py:install"',
        '[[expectations]]\nfolder = "expectations"\ncandidate-setup = "scaled.py:install"'),
        "expectations: expectations",
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(900)  # about a minute, quiet
def test_a_right_trainer_passes_every_tier(trainer: Path) -> None:
    job = run_action(trainer, machine="box", output="runs/clean")
    assert job.results == CLEAN
    assert job.code == 0
    ours = {"assay.toml", ".github/workflows/assay.yml", ".github/workflows/assay-labels.yml"}
    written = {path.relative_to(trainer).as_posix() for path in trainer.rglob("*.y*ml")}
    assert written | {"assay.toml"} == ours


@pytest.mark.long
@pytest.mark.timeout(900)  # about a minute, quiet
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_red_at_its_tier(trainer: Path, tmp_path: Path, name: str) -> None:
    file, edit, where = BUGS[name]
    repository = tmp_path / "trainer"
    shutil.copytree(trainer, repository, ignore=shutil.ignore_patterns("runs"))
    (repository / "scaled.py").write_text(
        KERNELS.replace("layer.up_proj(x))", "layer.up_proj(x)) * 1.05"), encoding="utf-8"
    )
    path = repository / file
    path.write_text(edit(path.read_text(encoding="utf-8")), encoding="utf-8")
    job = run_action(repository, machine="box")
    assert job.code == 1
    failed = [step for step, result in job.results.items() if result == "failure"]
    assert where in failed
    tier = where.partition(":")[0]
    assert {step.partition(":")[0] for step in failed} == {tier}
