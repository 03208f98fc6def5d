"""DeepSpeed in a process: lazy import, and the message if it is missing."""

import ast
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest

import assay_smoke.trainers.deepspeed as package
from assay.errors import UsageError
from assay_smoke.trainers.deepspeed import process
from assay_smoke.trainers.deepspeed.trainer import DeepSpeedTrainer


def imported_at_once(file: Path) -> set[str]:
    """Return the packages that a module imports at import."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    return found


def test_no_module_imports_deepspeed_before_it_is_used() -> None:
    files = list(Path(str(package.__file__)).parent.glob("*.py"))

    assert len(files) > 5
    for file in files:
        assert "deepspeed" not in imported_at_once(file), file


def test_missing_deepspeed_is_one_sentence_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find(name: str) -> ModuleSpec | None:
        return None if name == "deepspeed" else find_spec(name)

    monkeypatch.setattr(process, "find_spec", find)

    with pytest.raises(UsageError) as raised:
        DeepSpeedTrainer()

    assert str(raised.value) == (
        "the trainer deepspeed needs DeepSpeed: pip install 'assay-smoke[deepspeed]'"
    )
