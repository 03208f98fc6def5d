"""Installs GitHub's packages, and bundles them with our program."""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from assay.errors import MachineError, exit_in_words

SOURCES = Path(__file__).parent / "node"
# Used by `nox -s runners`, below the root of a checkout.
FOLDER = Path(".nox/evaluating")
BUNDLE = "evaluate.cjs"
# The digest of the sources of the bundle, which may have changed since.
STAMP = "sources.sha256"

_TIMEOUT_SECONDS = 600
# A download that stalls is tried again after 30 s; npm would wait five minutes.
_STALLED = "--fetch-timeout=30000"


def install(folder: Path, npm: Path | None = None) -> Path:
    """Make the bundle in `folder`, unless it is up to date.

    npm: the program, in the same folder as node; None finds it on PATH.
    Returns: the bundle, for `node BUNDLE`.
    Raises: MachineError if npm is missing or fails.
    """
    bundle = folder / BUNDLE
    if is_installed(folder):
        return bundle
    program = npm or _find("npm")
    folder.mkdir(parents=True, exist_ok=True)
    for source in _sources():
        shutil.copy(source, folder)
    # The program of esbuild is a package of its own, which needs no install script.
    for words in (
        ["ci", "--ignore-scripts", "--no-audit", "--no-fund", _STALLED],
        ["run", "bundle"],
    ):
        _run_npm(program, words, folder)
    (folder / STAMP).write_text(hash_sources(), encoding="utf-8")
    return bundle


def is_installed(folder: Path) -> bool:
    """Check that `folder` has a bundle of the current sources."""
    stamp = folder / STAMP
    return (
        (folder / BUNDLE).is_file()
        and stamp.is_file()
        and stamp.read_text(encoding="utf-8") == hash_sources()
    )


def hash_sources() -> str:
    """Hash all sources and the versions of the packages."""
    digest = hashlib.sha256()
    for source in _sources():
        digest.update(f"{source.name}\0{source.stat().st_size}\0".encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _sources() -> Iterator[Path]:
    yield from sorted([*SOURCES.glob("*.mjs"), *SOURCES.glob("package*.json")])


def _find(name: str) -> Path:
    found = shutil.which(name)
    if found is None:
        raise MachineError(
            f"there is no {name} on the path\nNext: nox -s runners, which installs it"
        )
    return Path(found)


def _run_npm(npm: Path, words: list[str], folder: Path) -> None:
    path = os.pathsep.join([str(npm.parent), os.environ.get("PATH", "")])
    try:
        ended = subprocess.run(
            [str(npm), *words],
            cwd=folder,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MachineError(f"npm {' '.join(words)} in {folder}: {error}") from error
    if ended.returncode != 0:
        output = (ended.stderr or ended.stdout).strip()
        raise MachineError(
            f"npm {' '.join(words)} in {folder} {exit_in_words(ended.returncode)}:\n{output}"
        )
