"""Builds the distributions of the published packages from a clean clone, and tries their wheels."""

import os
import re
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nox

from environments.shared import (
    PUBLISHED,
    ROOT,
    Environment,
    install_release_tools,
    wheel_environment,
)

DISTRIBUTIONS = ROOT / "dist"

_TAG = "refs/tags/"


def release_packages(session: nox.Session) -> None:
    """Build the published packages, then run the self-test and each package's command with nothing but their wheels.

    The session's arguments are versions of Python; by default the one that runs nox.
    """
    manifest = nox.project.load_toml(ROOT / "packages" / "core" / "pyproject.toml")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    try:
        require_release(os.environ.get("GITHUB_REF", ""), manifest["project"]["version"], changelog)
    except ValueError as error:
        session.error(str(error))
    tools = install_release_tools(session)
    tools.run(session, "towncrier", "build", "--draft", "--version", manifest["project"]["version"])
    build_distributions(session, tools)
    for python in session.posargs or [".".join(map(str, sys.version_info[:2]))]:
        environment = wheel_environment(session, python, sorted(DISTRIBUTIONS.glob("*.whl")))
        with TemporaryDirectory() as folder, session.chdir(folder):
            environment.run(session, "assay.cli", "selftest")
            for command in ("bench", "expect", "smoke"):
                environment.run(session, "assay.cli", command, "--help")


def require_release(ref: str, version: str, changelog: str) -> None:
    """Raise ValueError if `ref` is the tag of another version, or of one without changes.

    ref: GITHUB_REF. A branch is a dry run.
    changelog: the text of CHANGELOG.md.
    """
    if not ref.startswith(_TAG):
        return
    if ref != f"{_TAG}v{version}":
        raise ValueError(
            f"the tag is {ref.removeprefix(_TAG)}, and the packages have version {version}"
        )
    if not is_released(version, changelog):
        raise ValueError(f"CHANGELOG.md has no section '## {version} (DATE)'")


def is_released(version: str, changelog: str) -> bool:
    """Return True if the changelog has a section of this version with a date."""
    return bool(re.search(rf"^## {re.escape(version)} \(\d{{4}}-", changelog, re.MULTILINE))


def build_distributions(session: nox.Session, tools: Environment) -> None:
    """Build the last commit into DISTRIBUTIONS: each wheel from the source distribution."""
    shutil.rmtree(DISTRIBUTIONS, ignore_errors=True)
    with TemporaryDirectory() as folder:
        clone = Path(folder) / "assay"
        options = ("--quiet", "--no-hardlinks")
        session.run("git", "clone", *options, str(ROOT), str(clone), external=True)
        for name in PUBLISHED:
            package = clone / "packages" / name
            shutil.copy(clone / "LICENSE", package)
            words = ("--no-isolation", "--outdir", str(DISTRIBUTIONS), str(package))
            tools.run(session, "build", *words)
    files = sorted(DISTRIBUTIONS.iterdir())
    tools.run(session, "twine", "check", "--strict", *map(str, files))
    for file in files:
        session.log(f"{file.name}: {file.stat().st_size / 1000:,.0f} kB")
