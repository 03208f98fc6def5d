"""docs/python.md in a real notebook kernel: its blocks are the cells."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import assay

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("notebook")
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


@pytest.fixture(scope="module")
def outputs(folder: Path) -> list[list[Any]]:
    """What each cell shows."""
    text = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    cells = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    return [cell.outputs for cell in notebook.cells]


def printed(outputs: list[Any]) -> str:
    return "".join(output.text for output in outputs if output.get("name") == "stdout")


def test_the_planted_fault_is_found_and_printed(outputs: list[list[Any]]) -> None:
    lines = printed(outputs[0]).splitlines()
    assert lines[0] == "✗ FAIL: micro:llama on cpu/bfloat16 against cpu/float32"
    assert lines[1].startswith("model.layers.1.mlp.down_proj, operation linear")
    assert lines[-2].startswith("report: runs/")
    assert lines[-1].startswith("Next: assay ")
    progress = [output.text for output in outputs[0] if output.get("name") == "stderr"]
    assert "\x1b" not in "".join(progress)


def test_the_verdict_is_shown_as_the_first_screen(outputs: list[list[Any]]) -> None:
    (shown,) = outputs[1]
    assert '<div class="assay-verdict">' in shown.data["text/html"]
    assert "model.layers.1.mlp.down_proj" in shown.data["text/html"]
    assert shown.data["text/plain"].startswith("<FAIL: micro:llama on cpu/bfloat16 against")


def test_a_live_model_passes_and_its_command_can_be_typed(
    outputs: list[list[Any]], folder: Path
) -> None:
    assert printed(outputs[2]).startswith("<PASS: micro:llama on cpu/bfloat16 against")
    (file,) = folder.glob("runs/*/candidate_model.py")
    text = (file.parent / "verdict.json").read_text(encoding="utf-8")
    verdict = assay.Verdict.model_validate_json(text)
    assert verdict.command[:4] == ["assay", "check", "generate", "micro:llama"]
    relative = file.relative_to(folder)
    assert verdict.command[-4:] == [
        "--candidate-setup", f"{relative}:LlamaForCausalLM", "--level", "logits"
    ]  # fmt: skip


def test_what_the_model_did_is_recorded(outputs: list[list[Any]], folder: Path) -> None:
    assert all(output.get("output_type") != "error" for output in outputs[3])
    assert (folder / "captured").is_dir()
