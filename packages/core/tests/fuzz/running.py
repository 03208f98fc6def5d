"""All readers, one after another, within a budget of time."""

import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packages.core.tests.fuzz.cases import Result, Sample, run_cases
from packages.core.tests.fuzz.commands import run_commands
from packages.core.tests.fuzz.reader import Reader

# Findings of one reader after which it is left: the rest would be the same one.
MOST_FINDINGS = 20
_ALL_CASES = range(1 << 31)


@dataclass
class Tally:
    """What became of the cases of a reader."""

    reader: Reader
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: dict[str, Result] = field(default_factory=dict)
    """By what was found, the first case."""

    slowest: Result | None = None

    def add(self, result: Result) -> None:
        """Count a case."""
        self.outcomes[result.outcome] += 1
        if self.slowest is None or result.seconds > self.slowest.seconds:
            self.slowest = result

    def __str__(self) -> str:
        slowest = (
            f"; case {self.slowest.number} took {self.slowest.seconds:.1f} s"
            if self.slowest
            else ""
        )
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items()))
        return f"{self.reader.name:32} {sum(self.outcomes.values()):6} cases: {counts}{slowest}"


def fuzz_reader(
    reader: Reader, seed: int, seconds: float, keep: Path, numbers: range = _ALL_CASES
) -> Tally:
    """Run cases of one reader for so many seconds, and keep the files of findings."""
    tally = Tally(reader)
    with tempfile.TemporaryDirectory(prefix="assay-fuzz-") as folder:
        sample = Sample(reader, Path(folder))
        for result in run_cases(sample, seed, numbers, time.monotonic() + seconds):
            tally.add(result)
            if result.finding is None or result.finding in tally.findings:
                continue
            kept = keep / f"{reader.name}-{result.number}" / "sample"
            mutation = sample.mutate(seed, result.number, kept)
            if sample.log.exists():
                shutil.copy(sample.log, kept.parent / "log")
            tally.findings[result.finding] = result
            _say(
                f"FOUND {reader.name}: {result.finding}\n  {mutation}\n  {kept}\n"
                f"  nox -s fuzz -- --seed {seed} --reader {reader.name} --case {result.number}"
            )
            if len(tally.findings) >= MOST_FINDINGS:
                break
    return tally


def fuzz_readers(readers: Sequence[Reader], seed: int, seconds: float, keep: Path) -> list[Tally]:
    """Divide the time over the readers."""
    end = time.monotonic() + seconds
    tallies = []
    for number, reader in enumerate(readers):
        share = (end - time.monotonic()) / (len(readers) - number)
        tallies.append(fuzz_reader(reader, seed, max(share, 0.0), keep))
        _say(str(tallies[-1]))
    return tallies


def fuzz_commands(readers: Sequence[Reader], seed: int, seconds: float, keep: Path) -> int:
    """Run commands on mutated files. Returns: how many did not end as they should."""
    codes: Counter[int | None] = Counter()
    num_found = 0
    with tempfile.TemporaryDirectory(prefix="assay-fuzz-") as folder:
        by_name = {reader.name: reader for reader in readers}
        for ran in run_commands(by_name, seed, seconds, Path(folder)):
            codes[ran.code] += 1
            if ran.problem is None:
                continue
            num_found += 1
            kept = keep / f"command-{num_found}.txt"
            kept.write_text(f"{ran.command.name}\n{ran.mutation}\n\n{ran.printed}")
            _say(f"FOUND {ran.problem}: {ran.command.name}\n  {ran.mutation}\n  {kept}")
    counts = ", ".join(f"{count} ended with {code}" for code, count in codes.items())
    _say(f"{'commands':32} {sum(codes.values()):6} cases: {counts}")
    return num_found


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
