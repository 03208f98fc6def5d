"""GitHub's own packages, installed once below .nox."""

from pathlib import Path

import pytest

from packages.runners.tests.github_parser.installing import FOLDER, install

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="session", autouse=True)
def parser() -> Path:
    """The bundle; a missing node or npm is an error, no skip: this is what the session is for."""
    return install(ROOT / FOLDER)
