"""Where the compiled sums come from."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from assay import kernel
from assay.kernel import POOLED, compiled


@pytest.fixture
def not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Sources in a folder of their own, without a compiled library; its folder."""
    sources = tmp_path / "kernel"
    sources.mkdir()
    for name in (*compiled.SOURCES, "vectors.h"):
        shutil.copy(compiled.FOLDER / name, sources)
    monkeypatch.setattr(compiled, "FOLDER", sources)
    monkeypatch.setattr(compiled, "FLAGS", ("-O0", "-fPIC", "-shared"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    compiled.library.cache_clear()
    yield sources
    compiled.library.cache_clear()


def test_compiles_once_beside_the_source(not_loaded: Path) -> None:
    assert compiled.library() is not None
    (made,) = (not_loaded / "__pycache__").iterdir()
    written = made.stat().st_mtime_ns

    compiled.library.cache_clear()

    assert compiled.library() is not None
    assert made.stat().st_mtime_ns == written


def test_a_changed_source_is_compiled_again(not_loaded: Path) -> None:
    compiled.library()
    with (not_loaded / "pairs.c").open("a") as file:
        file.write("/* changed */\n")
    compiled.library.cache_clear()
    compiled.library()

    assert len(list((not_loaded / "__pycache__").iterdir())) == 2


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_torch_computes_where_nothing_compiles(
    compiler: str, not_loaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler)

    sums = kernel.sum_pair(torch.ones(2, 3), torch.zeros(2, 3))

    assert compiled.library() is None
    assert sums.dd == 6.0
    assert not list((not_loaded / "__pycache__").iterdir())


def test_compiles_into_the_home_where_the_source_is_read_only(
    not_loaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (not_loaded / "__pycache__").write_text("a file, below which nothing can be made")

    assert compiled.library() is not None
    assert len(list((not_loaded.parent / "home" / ".cache" / "assay").iterdir())) == 1

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    compiled.library.cache_clear()

    assert compiled.library() is None


def test_a_damaged_library_is_compiled_again(not_loaded: Path) -> None:
    damaged = not_loaded / "__pycache__" / compiled.file_name()
    damaged.parent.mkdir()
    damaged.write_bytes(b"cut off")

    assert compiled.library() is not None
    assert damaged.stat().st_size > 7


@pytest.mark.usefixtures("not_loaded")
@pytest.mark.parametrize("change", ["other order", "one more"])
def test_other_sums_in_c_than_in_python_are_an_error(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = (*reversed(POOLED),) if change == "other order" else (*POOLED, "ddd")
    monkeypatch.setattr(compiled, "POOLED", others)

    with pytest.raises(RuntimeError, match=r"^pairs.c has the sums .*'ee', 'dd'.*, sums.py has "):
        compiled.library()


def test_sources_compile_without_a_warning(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    options = (
        *compiled.FLAGS,
        "-O1",
        "-Wall",
        "-Wextra",
        "-Wno-psabi",
        "-o",
        str(tmp_path / "sums.so"),
    )
    sources = (str(compiled.FOLDER / name) for name in compiled.SOURCES)

    done = subprocess.run(
        ["cc", *options, *sources, "-lm"], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
