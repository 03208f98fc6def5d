"""What a change of files can touch; the imports that prove it are followed."""

import ast
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

from assay_smoke.matrix.choosing.changes import (
    ALL,
    TOUCHED,
    Changes,
    ChangesError,
    files_since,
    listed_files,
)

ROOT = Path(__file__).parents[6]
SOURCES = tuple(ROOT / f"packages/{name}/src" for name in ("core", "expectations", "smoke"))
TRAINERS = {
    "one-process": "reference", "ddp": "ddp", "fsdp": "fsdp",
    "tensor-parallel": "tensor_parallel", "pipeline": "pipeline",
}  # fmt: skip

ZERO = {"zero1", "zero2", "zero3"}


def file_of(dotted_name: str) -> Path | None:
    parts = dotted_name.split(".")
    for count in range(len(parts), 0, -1):
        for source in SOURCES:
            path = source.joinpath(*parts[:count])
            for file in (path.with_suffix(".py"), path / "__init__.py"):
                if file.is_file():
                    return file
    return None


@cache
def imported(file: Path) -> frozenset[Path]:
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    own = (name for name in names if name.partition(".")[0].startswith("assay"))
    return frozenset(filter(None, map(file_of, own)))


def reached(files: Iterable[Path]) -> set[Path]:
    """All that is imported from `files`, lazily or not."""
    seen: set[Path] = set()
    waiting = list(files)
    while waiting:
        file = waiting.pop()
        if file not in seen:
            seen.add(file)
            waiting += imported(file)
    return seen


def mapped_sources() -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Every file of core that is said to touch some frameworks only."""
    for file in sorted(SOURCES[0].rglob("*.py")):
        path = file.relative_to(ROOT).as_posix()
        frameworks = next(
            (names for pattern, names, _ in TOUCHED if fnmatchcase(path, pattern)), ALL
        )
        if frameworks != ALL:
            yield file, frameworks


def test_imports_reach_no_other_framework_than_the_map_says() -> None:
    folder = SOURCES[0] / "assay/training/trainers"
    users = {name: reached([folder / f"{file}.py"]) for name, file in TRAINERS.items()}
    # What every case runs: the cycle, its judges, and the planner itself.
    everywhere = reached(
        file
        for file in SOURCES[2].rglob("*.py")
        if "deepspeed" not in file.parts and file.name != "__init__.py"
    )
    mapped = dict(mapped_sources())
    assert len(mapped) > 10
    missed = {
        file.relative_to(ROOT).as_posix(): sorted(name for name in users if file in users[name])
        for file, frameworks in mapped.items()
        if file in everywhere
        or not {name for name in users if file in users[name]} <= set(frameworks)
    }
    assert missed == {}


def test_every_pattern_fits_a_file() -> None:
    paths = [
        path.relative_to(ROOT).as_posix()
        for folder in ("packages", "docs", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
    ]
    paths += [path.name for path in ROOT.iterdir() if path.is_file()]
    # The trainer of DeepSpeed is a folder of its own.
    stale = [
        pattern
        for pattern, _, _ in TOUCHED
        if "deepspeed" not in pattern and not any(fnmatchcase(path, pattern) for path in paths)
    ]
    assert stale == []


CORE = "packages/core/src/assay"


@pytest.mark.parametrize(
    ("file", "frameworks"),
    [
        ("docs/training.md", set()),
        ("README.md", set()),
        ("packages/bench/src/assay_bench/jobs.py", set()),
        ("packages/core/tests/unit/test_noise.py", set()),
        (f"{CORE}/training/trainers/ddp.py", {"ddp"}),
        (f"./{CORE}/training/trainers/ddp.py", {"ddp"}),
        (f"{CORE}/training/trainers/pipeline.py", {"pipeline"}),
        (f"{CORE}/training/trainers/tensor_parallel.py", {"tensor-parallel", "pipeline"}),
        (f"{CORE}/training/trainers/fsdp.py", {"fsdp", "tensor-parallel", "pipeline"}),
        ("packages/smoke/src/assay_smoke/trainers/deepspeed/trainer.py", ZERO),
        # In doubt all.
        (f"{CORE}/training/trainers/reference.py", set(ALL)),
        (f"{CORE}/training/trainers/adapters.py", set(ALL)),
        (f"{CORE}/parallel/tensor_parallel/heads.py", set(ALL)),
        (f"{CORE}/metrics.py", set(ALL)),
        ("packages/smoke/src/assay_smoke/cases/running.py", set(ALL)),
        ("packages/smoke/tests/planted_trainers.py", set(ALL)),
        ("packages/bench/pyproject.toml", set(ALL)),
        ("pyproject.toml", set(ALL)),
        ("constraints.txt", set(ALL)),
        ("noxfile.py", set(ALL)),
        ("environments/shared.py", set(ALL)),
        ("examples/own_trainer.py", set(ALL)),
        ("somewhere/else.py", set(ALL)),
        ("docs/../noxfile.py", set(ALL)),
        ("/elsewhere/docs/training.md", set(ALL)),
        (f"{CORE}/training/trainers/ddp.py.orig", set(ALL)),
    ],
)
def test_a_file_touches_what_its_imports_allow(file: str, frameworks: set[str]) -> None:
    assert Changes.of([file]).frameworks == frameworks


def test_files_touch_together_what_each_touches() -> None:
    changes = Changes.of([f"{CORE}/training/trainers/ddp.py", "docs/a.md", "docs/b.md"])
    assert changes.frameworks == changes.named == {"ddp"}
    assert changes.reasons == (
        f"{CORE}/training/trainers/ddp.py: the trainer of ddp, touches ddp",
        "docs/a.md, docs/b.md: documentation, touches no case",
    )


def test_a_doubt_touches_all_and_names_none() -> None:
    changes = Changes.of([f"{CORE}/training/trainers/ddp.py", "noxfile.py"])
    assert changes.frameworks == set(ALL)
    assert changes.named == {"ddp"}


def test_an_absolute_path_below_the_working_directory_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Changes.of([str(tmp_path / "docs" / "a.md")]).frameworks == set()


def test_lists_of_files_may_have_several_lines() -> None:
    assert listed_files(["a.py\n b.py \n\n", "c.py"]) == ["a.py", "b.py", "c.py"]


@pytest.mark.parametrize("values", [[], [""], ["\n "]])
def test_an_empty_list_is_an_error_and_not_nothing(values: list[str]) -> None:
    with pytest.raises(ChangesError, match="--changed names no file"):
        listed_files(values)


def test_what_changed_is_asked_of_git(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"rev-parse --verify": "c0ffee\n", "diff": "a.py\0docs/ü b.md\0"}
    answers |= {"rev-parse --show-toplevel": "/repository\n", "-C": "new.py\0"}
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> object:
        asked.append(command)
        said = next(text for start, text in answers.items() if f" {start}" in " ".join(command))
        return type("Done", (), {"returncode": 0, "stdout": said, "stderr": ""})

    monkeypatch.setattr("subprocess.run", run)
    assert files_since("main") == ["a.py", "docs/ü b.md", "new.py"]
    assert asked[1][-2:] == ["c0ffee", "--"]


def test_what_git_cannot_tell_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(command: list[str], **_: object) -> object:
        said = "warning: x\nfatal: Needed a single revision\n"
        return type("Done", (), {"returncode": 128, "stdout": "", "stderr": said})

    monkeypatch.setattr("subprocess.run", refuse)
    with pytest.raises(ChangesError) as raised:
        files_since("mian")
    assert str(raised.value) == (
        "--since mian: git cannot tell what changed since: fatal: Needed a single revision"
    )
