"""Installs GitHub's packages and the program that uses them into a folder."""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from assay.errors import MachineError, exit_in_words

SOURCES = Path(__file__).parent / "node"
# Where `nox -s runners` installs it, below the root of a checkout.
FOLDER = Path(".nox/evaluating")
BUNDLE = "evaluate.cjs"
# Which sources the bundle was made of: it runs long after somebody edits them.
STAMP = "sources.sha256"

_TIMEOUT_SECONDS = 600


def install(folder: Path, npm: Path | None = None) -> Path:
    """Makes the bundle in `folder`, unless it is there, made of the sources as they are now.

    npm: the program; its own folder has to hold node. None takes the first of the path.
    Returns: the bundle, for `node BUNDLE`.
    Raises: MachineError if there is no npm, or it cannot install or bundle.
    """
    bundle = folder / BUNDLE
    if is_installed(folder):
        return bundle
    program = npm or _find("npm")
    folder.mkdir(parents=True, exist_ok=True)
    for source in _sources():
        shutil.copy(source, folder)
    # esbuild brings its program as a package of its own, so that no script has to run.
    for words in (["ci", "--ignore-scripts", "--no-audit", "--no-fund"], ["run", "bundle"]):
        _run_npm(program, words, folder)
    (folder / STAMP).write_text(hash_sources(), encoding="utf-8")
    return bundle


def is_installed(folder: Path) -> bool:
    """Whether `folder` has the bundle of the sources as they are now."""
    stamp = folder / STAMP
    return (
        (folder / BUNDLE).is_file()
        and stamp.is_file()
        and stamp.read_text(encoding="utf-8") == hash_sources()
    )


def hash_sources() -> str:
    """One digest of all sources and of the versions of the packages."""
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
        raise MachineError(f"there is no {name} on the path\nNext: nox -s runners, which brings it")
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
        said = (ended.stderr or ended.stdout).strip()
        raise MachineError(
            f"npm {' '.join(words)} in {folder} {exit_in_words(ended.returncode)}:\n{said}"
        )
