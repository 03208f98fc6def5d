"""Another Python as the candidate's: what is wrong with it is one sentence."""

import sys
import venv
from importlib.metadata import version
from pathlib import Path

import pytest

from assay.errors import UsageError
from assay.launch import find_python, require_candidate_python
from assay.launch.process_groups import own_variables


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An environment without packages."""
    venv.create(tmp_path / "env", symlinks=True)
    return tmp_path / "env/bin/python"


def packages_of(python: Path) -> Path:
    (folder,) = (python.parents[1] / "lib").glob("python3*/site-packages")
    return folder


def claim_version(python: Path, number: str) -> None:
    folder = packages_of(python) / f"assay_core-{number}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Name: assay-core\nVersion: {number}\n", encoding="utf-8")


def refusal(python: Path) -> str:
    with pytest.raises(UsageError) as raised:
        require_candidate_python(python, Path("golden"))
    text = str(raised.value)
    assert "\n" not in text
    return text


def test_an_environment_without_assay_is_told_what_to_install(python: Path) -> None:
    here = version("assay-core")
    advice = f"{python} -m pip install assay-core=={here}"
    assert refusal(python) == f"--candidate-python {python} has no assay: {advice}"


def install_modules(python: Path, *names: str) -> None:
    for name in names:
        (packages_of(python) / name).parent.mkdir(parents=True, exist_ok=True)
        (packages_of(python) / name).touch()


ASSAY = "assay/__init__.py", "assay/launch/__init__.py", "assay/launch/fork_server.py"


def test_a_broken_torch_is_named_before_a_reference_runs(python: Path) -> None:
    claim_version(python, version("assay-core"))
    install_modules(python, *ASSAY)
    (packages_of(python) / "torch.py").write_text("raise ImportError('libtorch.so is missing')")
    why = "does not work: ImportError: libtorch.so is missing"
    assert refusal(python) == f"--candidate-python {python} {why}"


def test_another_version_of_assay_is_refused(python: Path) -> None:
    claim_version(python, "0.0.1")
    install_modules(python, *ASSAY)
    assert f"has assay 0.0.1, and this is {version('assay-core')}: " in refusal(python)


def test_an_assay_that_cannot_be_imported_is_named(python: Path) -> None:
    claim_version(python, version("assay-core"))
    assert refusal(python).endswith("ModuleNotFoundError: No module named 'assay'")


def test_the_python_of_this_process_is_refused_by_any_link(tmp_path: Path, python: Path) -> None:
    claim_version(python, version("assay-core"))
    install_modules(python, *ASSAY, "torch.py", "transformers.py")
    require_candidate_python(python, None)  # a link to the same program
    require_candidate_python(Path(sys.executable), Path("golden"))
    linked = tmp_path / "linked"
    linked.symlink_to(sys.prefix)
    for own in (Path(sys.executable), linked / "bin/python"):
        with pytest.raises(UsageError) as raised:
            require_candidate_python(own, None)
        assert str(raised.value) == (
            f"--candidate-python {own} is the Python that runs assay: both sides would run the same code; name that"
            " of another environment"
        )


@pytest.mark.parametrize(
    ("name", "why"),
    [("absent", "cannot be run"), ("/bin/false", "does not work: it printed no answer")],
)
def test_what_is_no_python_is_refused(tmp_path: Path, name: str, why: str) -> None:
    assert why in refusal(tmp_path / name)


def test_another_python_gets_no_import_path_from_here() -> None:
    given = {"PYTHONPATH": "here", "PYTHONHOME": "here", "HOME": "kept"}
    assert own_variables(Path(sys.executable), given) == {"HOME": "kept"}
    assert "here" not in own_variables(None, given)["PYTHONPATH"]


def test_an_environment_is_named_by_its_folder_or_its_python(tmp_path: Path) -> None:
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (tmp_path / "file").write_text("no program")
    assert find_python(tmp_path / "venv") == find_python(python) == python
    assert [find_python(tmp_path / name) for name in ("absent", "venv/bin", "file")] == [None] * 3
