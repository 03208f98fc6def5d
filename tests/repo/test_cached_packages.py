"""ASSAY_PACKAGES: a new environment sees the packages of a cached one."""

import subprocess
import venv
from pathlib import Path

import pytest

from environments.shared import Environment, packages_folder, see_cached_packages


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """Make a folder of packages: `kept`, and `edited`, whose code is in a checkout."""
    packages = packages_folder(tmp_path / "cached")
    packages.mkdir(parents=True)
    (tmp_path / "checkout").mkdir()
    (packages / "kept.py").touch()
    (tmp_path / "checkout/edited.py").touch()
    (packages / "edited.pth").write_text(f"{tmp_path}/checkout\n")
    return tmp_path / "cached"


@pytest.mark.parametrize(
    ("named", "module", "is_seen"),
    [("cached", "kept", True), ("cached", "edited", False), ("", "kept", False), ("gone", "kept", False)],
)  # fmt: skip
def test_only_installed_packages_are_seen(
    cached: Path, monkeypatch: pytest.MonkeyPatch, named: str, module: str, is_seen: bool
) -> None:
    monkeypatch.setenv("ASSAY_PACKAGES", named and str(cached.parent / named))
    environment = Environment(cached.parent / "new")
    venv.create(environment.folder)
    see_cached_packages(environment)
    command = [environment.python, "-c", f"import {module}"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert (done.returncode == 0) is is_seen
