import json
import platform
import subprocess
import sys
from datetime import datetime, timedelta
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from assay.runs import provenance
from assay.runs.provenance import redact


def test_provenance_is_json_with_command_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/assay", "compare", "a", "b"])
    facts = json.loads(json.dumps(provenance()))
    assert facts["command"] == ["assay", "compare", "a", "b"]
    assert facts["python"] == platform.python_version()
    assert facts["versions"]["numpy"] == metadata.version("numpy")
    assert facts["num_cpus"] >= 1
    assert facts["cpu"]
    age = datetime.now().astimezone() - datetime.fromisoformat(facts["date"])
    assert timedelta(0) <= age < timedelta(minutes=1)


def test_settings_are_recorded_and_secrets_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_TORCH", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("ASSAY_TOKEN", "secret")
    monkeypatch.setenv("TORCH_API_KEY", "secret")
    monkeypatch.setenv("NEURON_CC_FLAGS", "--upload-token=secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("PASSWORD", "secret")
    variables = provenance()["variables"]
    assert variables["ASSAY_TORCH"] == "cpu"
    assert variables["OMP_NUM_THREADS"] == "1"
    assert variables["CUDA_VISIBLE_DEVICES"] == "0"
    assert variables["NEURON_CC_FLAGS"] == "--upload-token=***"
    assert "secret" not in variables.values()


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--model-args", "model=m,api_key=abc,tp=2"], ["--model-args", "model=m,api_key=***,tp=2"]),
        (["--hub-token", "abc", "x"], ["--hub-token", "***", "x"]),
        (["--password=abc"], ["--password=***"]),
        (["https://me:abc@host/x"], ["https://***@host/x"]),
        (["hf_" + "a" * 20], ["***"]),
        (["Authorization:abc"], ["Authorization:***"]),
        (["--max-new-tokens", "16"], ["--max-new-tokens", "16"]),
        (["--tokenizer", "t", "author=me"], ["--tokenizer", "t", "author=me"]),
    ],
)  # fmt: skip
def test_secrets_of_a_command_are_hidden(words: list[str], shown: list[str]) -> None:
    assert redact(words) == shown


def test_commit_of_the_working_directory_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(
            ["git", *identity, *arguments],
            cwd=tmp_path, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout.strip()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance()["git"] is None
    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    assert provenance()["git"] == {"commit": git("rev-parse", "HEAD"), "changed": False}
    (tmp_path / "file").write_text("two")
    assert provenance()["git"]["changed"] is True


def test_machine_without_git_has_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert provenance()["git"] is None


def test_distribution_that_is_absent_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    module = sys.modules["assay.runs.provenance"]
    monkeypatch.setattr(module, "_version", vars(module)["_version"].__wrapped__)
    monkeypatch.setattr(metadata, "version", absent)
    assert set(provenance()["versions"].values()) == {None}


def test_neither_the_room_nor_its_facts_load_torch() -> None:
    script = (
        "import json, sys, assay.runs, assay.launch.child_process\n"
        "facts = assay.runs.provenance()\n"
        "loaded = sorted({'torch', 'transformers', 'rich'} & set(sys.modules))\n"
        "print(json.dumps([loaded, facts['num_threads'], facts['versions']['torch'] is None]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    assert json.loads(done.stdout) == [[], None, False]


def test_threads_are_recorded_once_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = SimpleNamespace(get_num_threads=lambda: 7)
    monkeypatch.setitem(sys.modules, "torch", loaded)
    assert provenance()["num_threads"] == 7
