"""DeepSpeed's CPU Adam: its cache, and messages if it cannot be compiled."""

from pathlib import Path

import pytest
from deepspeed.ops.op_builder import CPUAdamBuilder

from assay.errors import MachineError
from assay.runs import open_progress
from assay_smoke.trainers.deepspeed.compiling import compile_ahead, extension_file, load_extension


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
