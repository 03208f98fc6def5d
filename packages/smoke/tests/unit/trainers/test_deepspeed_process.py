"""DeepSpeed in a process: lazy import, its compiled CPU Adam, and messages if either is missing."""

import ast
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest
from deepspeed.ops.op_builder import CPUAdamBuilder

import assay_smoke.trainers.deepspeed as package
from assay.errors import MachineError, UsageError
from assay.runs import open_progress
from assay_smoke.trainers.deepspeed import trainer
from assay_smoke.trainers.deepspeed.trainer import (
    DeepSpeedTrainer,
    compile_ahead,
    extension_file,
    load_extension,
)


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

    assert {file.stem for file in files} >= {"partitions", "trainer"}
    for file in files:
        assert "deepspeed" not in imported_at_once(file), file


def test_missing_deepspeed_is_one_sentence_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find(name: str) -> ModuleSpec | None:
        return None if name == "deepspeed" else find_spec(name)

    monkeypatch.setattr(trainer, "find_spec", find)

    with pytest.raises(UsageError) as raised:
        DeepSpeedTrainer()

    assert str(raised.value) == (
        "the trainer deepspeed needs DeepSpeed: pip install 'assay-smoke[deepspeed]'"
    )


def test_what_cannot_be_compiled_is_one_sentence_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Error building extension 'cpu_adam'\n1000 lines")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(CPUAdamBuilder, "jit_load", fail)

    with pytest.raises(MachineError) as raised:
        load_extension()

    assert str(raised.value) == (
        "cannot compile DeepSpeed's CPU Adam, which offload needs (Error building extension"
        " 'cpu_adam'): install a C++ compiler and ninja"
    )
    assert list(extension_file().parent.iterdir()) == []


def test_the_file_of_the_runner_comes_before_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cached = extension_file()
    monkeypatch.setenv("ASSAY_PACKAGES", str(tmp_path / "packages"))
    assert extension_file() == cached
    kept = tmp_path / "packages" / cached.relative_to(tmp_path / "cache")
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert extension_file() == kept


def test_a_file_that_is_no_extension_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    extension_file().parent.mkdir(parents=True)
    extension_file().write_text("half of a file")

    with pytest.raises(MachineError, match="to compile it again"):
        load_extension()


def test_without_a_compiler_a_session_says_so_before_its_cases(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))

    with pytest.raises(MachineError, match="install a C"), open_progress() as progress:
        compile_ahead(tmp_path, progress)

    assert "no-compiler" in (tmp_path / "cpu-adam.log").read_text()
