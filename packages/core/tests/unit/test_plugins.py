import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay.plugins import find_plugin_file, load_object

WriteFile = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> WriteFile:
    def write_file(text: str, name: str = "plugin.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write_file


def test_function_of_a_file_is_found(write: WriteFile) -> None:
    path = write("def twice(x):\n    return 2 * x\n")

    assert load_object(f"{path}:twice")(21) == 42


def test_classes_with_annotations_of_their_own_file_work(write: WriteFile) -> None:
    path = write(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n"
        "@dataclass\nclass Pair:\n    left: int\n    right: int\n"
    )

    assert load_object(f"{path}:Pair")(1, 2).right == 2


def test_files_of_one_name_in_two_folders_are_two_modules(write: WriteFile) -> None:
    first = load_object(f"{write('def f(): return g()', 'a/plugin.py')}:f")
    source = "def g(): return 2\ndef f(): return g()"
    second = load_object(f"{write(source, 'b/plugin.py')}:f")

    assert second() == 2
    with pytest.raises(NameError):
        first()


@pytest.mark.parametrize(
    "reference", ["plugin.py", "plugin.py:", ":func", "plugin.txt:func", "func", ""]
)
def test_reference_of_another_form_is_refused(reference: str) -> None:
    with pytest.raises(UsageError, match=r"is not of the form FILE.py:NAME"):
        load_object(reference)


def test_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no file .*absent.py"):
        load_object(f"{tmp_path / 'absent.py'}:f")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("def f(:\n", "SyntaxError: invalid syntax"),
        ("import no_such_package_of_ours\n", "ModuleNotFoundError: No module named"),
    ],
    ids=["raises", "syntax", "import"],
)
def test_file_that_cannot_be_imported_is_reported_with_the_reason(
    write: WriteFile, text: str, error: str
) -> None:
    path = write(text)

    with pytest.raises(UsageError, match=rf"importing .*plugin.py raised {error}"):
        load_object(f"{path}:f")


def test_file_that_exits_is_an_error_and_does_not_end_the_process(write: WriteFile) -> None:
    path = write("import sys\nsys.exit(0)\n")

    with pytest.raises(UsageError, match="SystemExit"):
        load_object(f"{path}:f")


@pytest.mark.parametrize(
    ("name", "hint"), [("plan", "did you mean plant?"), ("other", "known: Tiny, plant")]
)
def test_a_missing_function_is_named_before_the_file_is_imported(
    write: WriteFile, name: str, hint: str
) -> None:
    path = write("import json\n1 / 0\ndef plant(model): ...\ndef _own(): ...\nclass Tiny: ...\n")

    with pytest.raises(UsageError) as raised:
        find_plugin_file(f"{path}:{name}")
    assert str(raised.value) == f"{path}:{name}: unknown function {name!r}; {hint}"


@pytest.mark.parametrize(
    "text", ["from os.path import *\n", "setattr(json, 'join', 1)\n", "exec('def join(): ...')\n"]
)
def test_a_name_that_only_running_the_file_shows_is_not_refused(
    write: WriteFile, text: str
) -> None:
    path = write(f"import json\n{text}")

    assert find_plugin_file(f"{path}:join") == (path, "join")


def test_value_that_cannot_be_called_is_refused(write: WriteFile) -> None:
    path = write("limit = 3\n")

    with pytest.raises(UsageError, match="limit"):
        load_object(f"{path}:limit")


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("from assay.cli import main; main()", "is not a dump of a known format"),
        (
            "from assay.cli.ending import exit_on_error\nwith exit_on_error():\n import torch",
            "torch: Failed to load the backend extension: torch_npu",
        ),
    ],
    ids=["inspect", "other commands"],
)
def test_a_backend_without_its_driver_is_no_bug(tmp_path: Path, code: str, problem: str) -> None:
    """torch_npu 2.9 raises on import where CANN is not installed, and torch imports it by entry point."""
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so')")
    about = tmp_path / "torch_npu-2.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.9\n")
    (about / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:load\n")
    (tmp_path / "empty").mkdir()
    path = os.pathsep.join([str(tmp_path), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-c", code, "inspect", str(tmp_path / "empty")],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert problem in ended.stderr
    assert "bug in assay" not in ended.stderr


def test_a_file_may_import_its_neighbor(write: WriteFile) -> None:
    write("SIZE = 7\n", "neighbor_of_a_plugin.py")
    path = write("from neighbor_of_a_plugin import SIZE\n\ndef size():\n    return SIZE\n")

    assert load_object(f"{path}:size")() == 7


@pytest.fixture
def checkouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], Path]]:
    """Return a function that writes the package `acme_loom` into a checkout, with this size."""

    def write(checkout: str, size: str) -> Path:
        package = tmp_path / checkout / "acme_loom"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "steps.py").write_text(f"def size():\n    return {size}\n")
        return package

    installed = write("installed", "1")
    monkeypatch.syspath_prepend(installed.parent)  # as an editable install does
    finders = [*sys.meta_path]
    yield write
    sys.meta_path[:] = finders
    for name in [*sys.modules]:
        if name.startswith("acme_loom"):
            del sys.modules[name]


IMPORT = "from acme_loom.steps import size\n"


def test_a_file_in_a_package_imports_its_own_package(
    checkouts: Callable[[str, str], Path],
) -> None:
    package = checkouts("mine", "2")
    (package / "checks.py").write_text(IMPORT)

    assert load_object(f"{package / 'checks.py'}:size")() == 2


def test_a_module_of_another_checkout_is_refused(
    checkouts: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = checkouts("mine", "2").parent
    (mine / "checks.py").write_text(IMPORT)
    monkeypatch.chdir(mine)

    with pytest.raises(UsageError, match=r"imports acme_loom\.steps from .*installed.* differs"):
        load_object(f"{mine / 'checks.py'}:size")


def test_a_module_on_pythonpath_and_an_equal_one_are_imported(
    checkouts: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    equal, chosen = checkouts("equal", "1").parent, checkouts("chosen", "2").parent
    for folder in (equal, chosen):
        (folder / "checks.py").write_text(IMPORT)

    monkeypatch.chdir(equal)
    assert load_object(f"{equal / 'checks.py'}:size")() == 1
    for name in ("acme_loom", "acme_loom.steps"):
        del sys.modules[name]
    monkeypatch.chdir(chosen)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "installed"))
    assert load_object(f"{chosen / 'checks.py'}:size")() == 1


def test_a_file_may_import_from_the_working_folder(
    write: WriteFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "in_the_working_folder.py").write_text("SIZE = 8\n")
    monkeypatch.chdir(tmp_path / "work")
    path = write("from in_the_working_folder import SIZE\n\ndef size():\n    return SIZE\n")

    assert load_object(f"{path}:size")() == 8
