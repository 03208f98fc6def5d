"""Installs GitHub's packages, and bundles them with our program."""

import hashlib
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


def install(folder: Path) -> Path:
    """Make the bundle in `folder`, unless it is up to date.

    Returns: the bundle, for `node BUNDLE`.
    Raises: MachineError if npm fails.
    """
    bundle = folder / BUNDLE
    stamp = folder / STAMP
    sources = hash_sources()
    if bundle.is_file() and stamp.is_file() and stamp.read_text(encoding="utf-8") == sources:
        return bundle
    folder.mkdir(parents=True, exist_ok=True)
    for source in _sources():
        shutil.copy(source, folder)
    # The program of esbuild is a package of its own, which needs no install script.
    for words in (
        ["ci", "--ignore-scripts", "--no-audit", "--no-fund", _STALLED],
        ["run", "bundle"],
    ):
        ended = subprocess.run(
            ["npm", *words],
            cwd=folder, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS,
        )  # fmt: skip
        if ended.returncode != 0:
            output = (ended.stderr or ended.stdout).strip()
            call = f"npm {' '.join(words)} in {folder}"
            raise MachineError(f"{call} {exit_in_words(ended.returncode)}:\n{output}")
    stamp.write_text(sources, encoding="utf-8")
    return bundle


def hash_sources() -> str:
    """Hash all sources and the versions of the packages."""
    digest = hashlib.sha256()
    for source in _sources():
        digest.update(f"{source.name}\0{source.stat().st_size}\0".encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _sources() -> Iterator[Path]:
    yield from sorted([*SOURCES.glob("*.mjs"), *SOURCES.glob("package*.json")])
