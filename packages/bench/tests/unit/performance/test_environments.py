import sys
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay_bench.performance.environments import Environment
from assay_bench.performance.suite_table import SUITES, choose_suites


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("name", ["absent", "empty", "file"])
def test_path_without_python_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("no program")
    with pytest.raises(UsageError, match=f"{name} is not an environment: neither"):
        Environment.at(tmp_path / name)


def test_python_without_assay_bench_is_an_error(tmp_path: Path) -> None:
    program = write_program(tmp_path / "bin" / "python", f'exec "{sys.executable}" -I -S "$@"')
    with pytest.raises(UsageError, match=r"No module named 'assay_bench'.*pip$"):
        Environment.at(tmp_path)
    with pytest.raises(UsageError, match="lacks the suites"):
        Environment.at(program)


@pytest.mark.parametrize("answer", ["", "hello", "[]", '{"suites": []}'])
def test_other_program_is_an_error(tmp_path: Path, answer: str) -> None:
    program = write_program(tmp_path / "python", f"echo '{answer}'")
    with pytest.raises(UsageError, match="lacks the suites of assay-bench"):
        Environment.at(program)


def test_another_environment_does_not_inherit_the_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("ASSAY_KEPT", "yes")
    answer = '{"suites": ["prefill"], "versions": {"torch": "2.9.0"}}'
    found = Environment.at(write_program(tmp_path / "python", f"echo '{answer}'"))
    assert "PYTHONPATH" not in found.variables
    assert found.variables["ASSAY_KEPT"] == "yes"
    assert found.versions == {"torch": "2.9.0"}
    found.require(choose_suites(["prefill"]))
    with pytest.raises(UsageError, match=f"no suite 'decode' in {tmp_path}"):
        found.require(choose_suites(["decode"]))


def test_this_environment_has_all_suites() -> None:
    assert list(Environment.current().suites) == list(SUITES)
