"""Mutate the files of every reader, and run whole commands on hostile ones: `nox -s fuzz`.

    python -m packages.core.tests.fuzz [--seconds 600] [--seed N] [--reader NAME] [--case N]

Every finding is printed with what reproduces it, and its files are kept.
"""

import argparse
import random
import sys
import tempfile
from pathlib import Path

from packages.core.tests.fuzz.registry import READERS
from packages.core.tests.fuzz.running import fuzz_commands, fuzz_reader, fuzz_readers

# A command takes seconds, a case of a reader a hundredth of one.
_SHARE_OF_COMMANDS = 0.3


def main() -> int:
    """Run. Returns: 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="nox -s fuzz --", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="for everything")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--reader", help="this one only; a part of its name")
    parser.add_argument("--case", type=int, help="this case of the reader only")
    parser.add_argument("--keep", type=Path, help="folder for the files of findings")
    given = parser.parse_args()
    keep = given.keep or Path(tempfile.mkdtemp(prefix="assay-fuzz-"))
    print(f"seed {given.seed}, {given.seconds:g} s; files of findings go to {keep}", flush=True)  # noqa: T201
    keep.mkdir(parents=True, exist_ok=True)
    readers = [one for one in READERS if given.reader is None or given.reader in one.name]
    if given.case is not None:
        (reader,) = (one for one in readers if one.name == given.reader)
        tallies = [
            fuzz_reader(reader, given.seed, given.seconds, keep, range(given.case, given.case + 1))
        ]
        return int(any(tally.findings for tally in tallies))
    share = 0.0 if given.reader else _SHARE_OF_COMMANDS
    tallies = fuzz_readers(readers, given.seed, (1 - share) * given.seconds, keep)
    num_found = fuzz_commands(readers, given.seed, share * given.seconds, keep) if share else 0
    return int(num_found > 0 or any(tally.findings for tally in tallies))


if __name__ == "__main__":
    sys.exit(main())
