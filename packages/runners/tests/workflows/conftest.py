"""Installs GitHub's own packages once, below .nox."""

from pathlib import Path

import pytest

from packages.runners.tests.fleet import ROOT
from packages.runners.tests.github_parser.installing import FOLDER, install


@pytest.fixture(scope="session", autouse=True)
def parser() -> Path:
    """Install the bundle. A missing node or npm is an error and not a skip."""
    return install(ROOT / FOLDER)
