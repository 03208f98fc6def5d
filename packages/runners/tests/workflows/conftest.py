"""Installs GitHub's own packages once, below .nox."""

from pathlib import Path

import pytest

from packages.runners.tests.github_parser.installing import FOLDER, install

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="session", autouse=True)
def parser() -> Path:
    """Install the bundle. A missing node or npm is an error and not a skip."""
    return install(ROOT / FOLDER)
