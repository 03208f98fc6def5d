"""Check goldens of one environment in others, and find drawn faults in the last one.

    python -m packages.core.tests.trials.upgrades OLD_PYTHON NEW_PYTHON... --folder DIR [--draw SEED]

Each environment has assay-core and assay-expectations.
"""

import argparse
import json
import random
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.verdicts import Verdict
from packages.core.tests.faults.corpus import Fault, corpus

MODELS = ("gemma2", "llama", "mixtral")
DTYPES = ("float32", "bfloat16")
NUM_DRAWN = 20
_VERSIONS = "import torch, transformers; print(torch.__version__, transformers.__version__)"


@dataclass(frozen=True)
class Environment:
    """An interpreter with its own torch and transformers."""

    python: Path

    def run(self, *words: str) -> str:
        """Run its Python. Returns: what it prints. Raises: CalledProcessError."""
        done = subprocess.run([self.python, *words], capture_output=True, text=True, check=True)
        return done.stdout

    def check(self, *words: str) -> Verdict:
        """Run a command of assay. Returns: its verdict."""
        with tempfile.TemporaryDirectory() as folder:
            command = [str(self.python), "-m", "assay.cli", *words, "--output", f"{folder}/run"]
            subprocess.run(command, capture_output=True, check=False)
            return Verdict.model_validate_json(Path(folder, "run/verdict.json").read_bytes())


def record(old: Environment, folder: Path) -> None:
    """Record a golden of each model, and an expectation of each model and dtype, unless they exist."""
    for model in MODELS:
        if not (golden := folder / model).exists():
            options = (
                "--run",
                "cpu/float32",
                "--noise-for",
                ",".join(DTYPES),
                "--output",
                str(golden),
            )
            old.run("-m", "assay.cli", "capture", f"micro:{model}", *options)
        for dtype in DTYPES:
            if not (file := folder / f"{model}-{dtype}.json").exists():
                options = "--run", f"cpu/{dtype}", "--output", str(file), "--reason", "a trial"
                old.run("-m", "assay.cli", "expect", "capture", f"micro:{model}", *options)


def check_golden(new: Environment, folder: Path, model: str, dtype: str, *setup: str) -> Verdict:
    """Check a model against its golden."""
    golden = "--golden", str(folder / model), "--candidate", f"cpu/{dtype}"
    return new.check("check", "generate", f"micro:{model}", *golden, *setup)


def describe(verdict: Verdict) -> str:
    """Return the outcome, the place and the answer about drift."""
    facts: list[Any] = [(level.model_extra or {}).get("drift") for level in verdict.levels.values()]
    place = verdict.location.model_dump_json(exclude_none=True) if verdict.location else ""
    return " ".join(filter(None, [verdict.verdict, place, *map(json.dumps, filter(None, facts))]))


def find_fault(new: Environment, folder: Path, fault: Fault) -> bool:
    """Return True if a fault is found at its module."""
    setup = "--candidate-setup", fault.setup
    verdict = check_golden(new, folder, fault.recipe, fault.dtype, *setup)
    print(f"{fault.name}: {describe(verdict)}", flush=True)  # noqa: T201
    return verdict.location is not None and verdict.location.module == fault.stage.module


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("pythons", nargs="+", type=Path, metavar="PYTHON")
    parser.add_argument(
        "--folder", type=Path, required=True, help="goldens of an earlier run are used again"
    )
    parser.add_argument("--draw", type=int, default=52, help="seed of the faults")
    given = parser.parse_args()
    old, *others = map(Environment, given.pythons)
    given.folder.mkdir(exist_ok=True)
    record(old, given.folder)
    print("recorded under", old.run("-c", _VERSIONS).strip())  # noqa: T201
    for new in others:
        print("checked under", new.run("-c", _VERSIONS).strip(), flush=True)  # noqa: T201
        for model in MODELS:
            for dtype in DTYPES:
                file = str(given.folder / f"{model}-{dtype}.json")
                golden = check_golden(new, given.folder, model, dtype)
                expectation = new.check("expect", "verify", file, "--run", f"cpu/{dtype}")
                found = f"golden {describe(golden)}; expectation {describe(expectation)}"
                print(f"{model} {dtype}: {found}", flush=True)  # noqa: T201
    known = [fault for fault in corpus() if fault.recipe in MODELS]
    drawn = random.Random(given.draw).sample(known, NUM_DRAWN)  # noqa: S311 - a draw of faults
    num_found = sum([find_fault(others[-1], given.folder, fault) for fault in drawn])
    print(f"{num_found} of {NUM_DRAWN} faults at their module")  # noqa: T201


if __name__ == "__main__":
    main()
