"""Hold verdicts and measurements to those of an earlier commit: `nox -s locked`.

    python -m packages.core.tests.locked FOLDER [--record] [--part NAME ...]

Record on the commit before a change of structure, compare on the commit after it, on one machine:
other hardware rounds differently. Times, paths and the environment are left out of the comparison.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from packages.core.tests.locked.parts import COMMANDS, CORPORA
from packages.core.tests.trials.kept import FOLDER, without_paths

_COMMANDS = "commands"
_LEFT_OUT = ("command", "environment", "files", "digest")

Kept = dict[str, dict[str, Any]]


def main() -> int:
    """Run the parts. Returns: 1 if a result differs, or is only on one side."""
    parser = argparse.ArgumentParser(prog="nox -s locked --", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where results were recorded, or will be")
    parser.add_argument("--record", action="store_true", help="record instead of comparing")
    parts = [*CORPORA, _COMMANDS]
    parser.add_argument("--part", choices=parts, action="append", help="repeatable; default: all")
    given = parser.parse_args()
    differing = 0
    for part in given.part or parts:
        started = time.monotonic()
        recorded = given.folder / "recorded" / f"{part}.jsonl"
        kept = run_part(part, given.folder / "runs" / part)
        if given.record:
            write(recorded, kept)
        differences = [] if given.record else list(compare(read(recorded), kept))
        differing += len(differences)
        print(*differences, sep="\n")  # noqa: T201
        took = f"{(time.monotonic() - started) / 60:.1f} min"
        print(f"{part}: {len(kept)} results, {len(differences)} differ, {took}", flush=True)  # noqa: T201
    return int(differing > 0)


def run_part(part: str, folder: Path) -> Kept:
    """Run a part in `folder`. Returns: its results by their names."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if part == _COMMANDS:
        return run_commands(folder)
    environment = {**os.environ, FOLDER: str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *CORPORA[part], "--capture=no", "--timeout=14400"]
    with (folder / "log").open("w") as log:
        subprocess.run(command, env=environment, stdout=log, stderr=log, check=False)
    lines = [line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    return by_name(map(json.loads, lines))


def run_commands(folder: Path) -> Kept:
    """Run whole commands, and read their verdicts and measurements."""
    kept: Kept = {}
    for name, words in COMMANDS.items():
        output = folder / name
        command = [sys.executable, "-m", "assay.cli", *(word.format(folder) for word in words)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (folder / f"{name}.log").open("w") as log:
            done = subprocess.run(
                [*command, "--output", str(output)],
                env=environment,
                stdout=log,
                stderr=log,
                check=False,
            )
        if done.returncode not in (0, 1, 3):
            raise RuntimeError(f"{name} came to no verdict: see {folder}/{name}.log")
        kept[name] = {"exit code": done.returncode} | {
            str(path.relative_to(output)): comparable(path, folder)
            for path in sorted(output.rglob("*"))
            if path.name in ("verdict.json", "measurements.jsonl")
        }
    return kept


def comparable(path: Path, folder: Path) -> Any:
    """Return the content of a file, without what differs in every run in `folder`."""
    text = path.read_text(encoding="utf-8").replace(str(folder), "FOLDER")
    if path.suffix == ".jsonl":
        return sha256(text.encode()).hexdigest()
    content = json.loads(without_paths(text))
    return {key: value for key, value in content.items() if key not in _LEFT_OUT}


def by_name(results: Iterator[dict[str, Any]]) -> Kept:
    """Return results by the task that gave them; tasks of one name are numbered."""
    kept: Kept = {}
    for result in sorted(results, key=lambda one: json.dumps(one, sort_keys=True)):
        name = result.pop("task")
        kept[name if name not in kept else f"{name} {len(kept)}"] = result
    return kept


def compare(recorded: Kept, kept: Kept) -> Iterator[str]:
    """Describe each difference. A part of a corpus is compared with the same part."""
    for name in sorted({*recorded, *kept}):
        if name not in kept:
            yield f"not run: {name[:200]}"
        elif name not in recorded:
            yield f"not recorded: {name[:200]}"
        else:
            for path in differences(recorded[name], kept[name]):
                yield f"{name[:200]}\n  {path}"


def differences(old: object, new: object, path: str = "") -> Iterator[str]:
    """Describe where two JSON values differ, and both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from differences(old.get(key), new.get(key), f"{path}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{path}[{number}]")
    elif old != new:
        yield f"{path}: {str(old)[:150]} -> {str(new)[:150]}"


def read(path: Path) -> Kept:
    """Read recorded results."""
    with path.open(encoding="utf-8") as file:
        return dict(map(json.loads, file))


def write(path: Path, kept: Kept) -> None:
    """Write results, a line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(item) + "\n" for item in kept.items())


if __name__ == "__main__":
    sys.exit(main())
