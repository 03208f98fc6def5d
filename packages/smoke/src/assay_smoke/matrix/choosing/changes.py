"""Which cases a change of files can touch; any doubt means all.

Only files are listed of which the imports prove what they reach (a test follows them): the adapters,
say, concern LoRA, but every trainer imports them, and an error in their import breaks every case.
"""

import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import get_args

from assay.errors import UsageError, name_some
from assay_smoke.matrix.cases import Framework

ALL: tuple[Framework, ...] = get_args(Framework)

# Frameworks that a file can touch, and what the file is.
_Effect = tuple[tuple[Framework, ...], str]

_CORE = "packages/core/src/assay/"
_TENSOR_PARALLEL = f"{_CORE}parallel/tensor_parallel/"
_PIPELINE = f"{_CORE}parallel/pipeline_parallel/"
_DIVIDED: tuple[Framework, ...] = ("tensor-parallel", "pipeline")
_ZERO: tuple[Framework, ...] = ("zero1", "zero2", "zero3")

# Patterns of paths from the root of the repository (`*` also stands for slashes) and the frameworks that
# they can touch. The first that fits counts; what fits none touches all.
TOUCHED: tuple[tuple[str, tuple[Framework, ...], str], ...] = (
    ("*pyproject.toml", ALL, "dependencies"),
    ("docs/*", (), "documentation"),
    ("[A-Z]*.md", (), "documentation"),
    ("LICENSE", (), "documentation"),
    ("packages/bench/*", (), "a package that smoke does not import"),
    ("packages/core/tests/*", (), "tests, which no case imports"),
    ("packages/expectations/tests/*", (), "tests, which no case imports"),
    ("tests/*", (), "tests, which no case imports"),
    (f"{_CORE}training/trainers/ddp.py", ("ddp",), "the trainer of ddp"),
    (f"{_CORE}training/trainers/fsdp.py", ("fsdp", *_DIVIDED), "the trainer of fsdp"),
    (f"{_CORE}parallel/fsdp.py", ("fsdp", *_DIVIDED), "sharding by FSDP2"),
    (f"{_CORE}training/trainers/tensor_parallel.py", _DIVIDED, "the trainer of tensor-parallel"),
    *(
        (f"{_TENSOR_PARALLEL}{name}.py", _DIVIDED, "dividing a model over ranks")
        for name in ("collectives", "decoder", "decoder_blocks", "division", "layers", "layout")
    ),
    (f"{_CORE}training/trainers/pipeline.py", ("pipeline",), "the trainer of pipeline"),
    (f"{_PIPELINE}pipeline.py", ("pipeline",), "the pipeline"),
    (f"{_PIPELINE}schedules.py", ("pipeline",), "schedules of the pipeline"),
    ("packages/smoke/src/assay_smoke/trainers/deepspeed/*", _ZERO, "the trainer of DeepSpeed"),
)


class ChangesError(UsageError):
    """Changes that cannot be told."""

    @classmethod
    def no_repository(cls, revision: str, reason: str) -> "ChangesError":
        """`reason`: what git said of the `revision`."""
        return cls(f"--since {revision}: git cannot tell what changed since: {reason}")

    @classmethod
    def no_file(cls) -> "ChangesError":
        """An empty list, which a failed command may have made."""
        return cls("--changed names no file: an empty list may be that of a command that failed")


@dataclass(frozen=True, slots=True)
class Changes:
    """What a change of files can touch.

    frameworks: whose cases it can touch.
    named: of these, those that some file names, and not only a doubt.
    reasons: for files of each kind what they are, and what they can touch.
    """

    frameworks: frozenset[Framework]
    named: frozenset[Framework]
    reasons: tuple[str, ...]

    @classmethod
    def of(cls, files: Sequence[str]) -> "Changes":
        """`files`: paths from the root of the repository, or below the working directory."""
        files_of: defaultdict[_Effect, list[str]] = defaultdict(list)
        for file in files:
            files_of[_effect(file)].append(file)
        touched = {name for frameworks, _ in files_of for name in frameworks}
        named = {name for frameworks, _ in files_of if frameworks != ALL for name in frameworks}
        reasons = [
            f"{name_some(some)}: {what}, {_in_words(frameworks)}"
            for (frameworks, what), some in files_of.items()
        ]
        return cls(frozenset(touched), frozenset(named), tuple(reasons))


def listed_files(values: Iterable[str]) -> list[str]:
    """The files of `--changed`, each value one or more lines.

    Raises: ChangesError where there is none.
    """
    files = [line.strip() for value in values for line in value.splitlines() if line.strip()]
    if not files:
        raise ChangesError.no_file()
    return files


def files_since(revision: str) -> list[str]:
    """Files that differ from the commit `revision` of git, with those that git does not know yet.

    Raises: ChangesError where git cannot tell.
    """
    # An option in place of a revision could do anything: only what git calls a commit goes on.
    commit = _git(revision, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
    options = ("--name-only", "--no-renames", "--no-relative", "-z")
    changed = _git(revision, "diff", *options, commit.strip(), "--")
    root = _git(revision, "rev-parse", "--show-toplevel").strip()
    new = _git(
        revision, "-C", root, "ls-files", "--others", "--exclude-standard", "--full-name", "-z"
    )
    return sorted({*changed.split("\0"), *new.split("\0")} - {""})


def _git(revision: str, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments],  # noqa: S607 - git comes from the path
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise ChangesError.no_repository(revision, f"{error.strerror}: git") from error
    if done.returncode:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise ChangesError.no_repository(revision, said.splitlines()[-1])
    return done.stdout


def _effect(file: str) -> _Effect:
    """The frameworks that a change of `file` can touch, and what it is."""
    path = _from_root(file)
    for pattern, frameworks, what in TOUCHED:
        if fnmatchcase(path, pattern):
            return frameworks, what
    return ALL, "not known to be without effect"


def _from_root(file: str) -> str:
    path = Path(file)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    # Without its dots it may be another file.
    return "" if ".." in path.parts else PurePosixPath(path).as_posix()


def _in_words(frameworks: tuple[Framework, ...]) -> str:
    if not frameworks:
        return "touches no case"
    return f"touches {'all cases' if frameworks == ALL else ', '.join(frameworks)}"
