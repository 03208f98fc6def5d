"""One case: a sample, mutated and read. Cases run in a child process, which may hang or crash."""

import json
import os
import random
import resource
import shutil
import signal
import time
import traceback
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from select import select

from assay.errors import AssayError
from packages.core.tests.fuzz.mutations.applying import mutate_file
from packages.core.tests.fuzz.reader import Reader, problem_with_message

LIMIT_SECONDS = 10.0
LIMIT_BYTES = 2 << 30
# On a machine that others use, a case counts as hanging by its own processor time; up to this.
BLOCKED_SECONDS = 30.0
_SECOND_MUTATION = 0.2
# The sentinel of mutations that try to run a command.
_EXECUTED = "executed"


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a case. finding: None where all is well; outcome: `error`, `same` or `other`."""

    number: int
    finding: str | None
    outcome: str
    seconds: float = 0.0


class Sample:
    """A sample of a reader, made once. `work`: the folder in which cases are mutated and read."""

    def __init__(self, reader: Reader, folder: Path) -> None:
        self.reader = reader
        self.whole = folder / "sample"
        self.work = folder / "case" / "sample"
        self.log = folder / "log"
        self.whole.mkdir(parents=True)
        reader.make(self.whole)

    def copy(self) -> None:
        """Make the folder of a case, not mutated."""
        self._copy_to(self.work)

    def mutate(self, seed: int, number: int, folder: Path | None = None) -> str:
        """Make case `number` in `folder`, by default in `work`. Returns: what was mutated."""
        rng = random.Random(f"{seed}/{self.reader.name}/{number}")  # noqa: S311 - reproducible
        folder = folder or self.work
        self._copy_to(folder)
        told = []
        for _ in range(2 if rng.random() < _SECOND_MUTATION else 1):
            file = rng.choice(self.reader.files(folder) or [folder])
            # The second mutation may find what can no longer be parsed.
            with suppress(Exception):
                told.append(f"{file.relative_to(folder)}: {mutate_file(file, rng)}")
        return "; ".join(told)

    def _copy_to(self, folder: Path) -> None:
        """A mutation may write beside the sample: the folder around it is the case's too."""
        shutil.rmtree(folder.parent, ignore_errors=True)
        shutil.copytree(self.whole, folder, symlinks=True)

    def conclude(self) -> str:
        """Read the folder of a case. Returns: the conclusion as text."""
        return repr(self.reader.read(self.work))


def run_cases(sample: Sample, seed: int, numbers: range, deadline: float) -> Iterator[Result]:
    """Run cases until the deadline, in child processes."""
    number = numbers.start
    while number in numbers and time.monotonic() < deadline:
        answers, write_end = os.pipe()
        child = os.fork()
        if not child:
            _run_in_child(sample, seed, range(number, numbers.stop), write_end)
        os.close(write_end)
        number = 1 + (yield from _watch(child, answers, number, deadline))


def _run_in_child(sample: Sample, seed: int, numbers: range, answers: int) -> None:
    log = os.open(sample.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(sample.whole.parent)
    try:
        sample.copy()
        expected = sample.conclude()
        baseline = _peak_bytes()
        for number in numbers:
            os.write(answers, f"{number}\n".encode())
            sample.mutate(seed, number)
            begun = time.monotonic()
            result = replace(_judge(sample, number, expected), seconds=time.monotonic() - begun)
            grown = _peak_bytes() - baseline
            if grown > LIMIT_BYTES:
                result = replace(result, finding=f"took {grown >> 20} MiB", outcome="memory")
            os.write(answers, (json.dumps(asdict(result)) + "\n").encode())
            if grown > LIMIT_BYTES:
                break  # the peak of a process never falls
    except BaseException:  # noqa: BLE001 - a child must not return into its parent's code
        text = json.dumps({"broken": traceback.format_exc()})
        os.write(answers, f"{text}\n".encode())
    os._exit(0)


def _judge(sample: Sample, number: int, expected: str) -> Result:
    finding, outcome = None, "same"
    try:
        found = sample.conclude()
    except AssayError as error:
        outcome, finding = "error", problem_with_message(error)
    except BaseException as error:  # noqa: BLE001 - the finding
        last = traceback.extract_tb(error.__traceback__)[-1]
        ours = [
            one for one in traceback.extract_tb(error.__traceback__) if "/src/assay" in one.filename
        ]
        place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else last.name
        outcome, finding = "traceback", f"{type(error).__name__} at {place}: {str(error)[:200]}"
        traceback.print_exc()
    else:
        if found != expected:
            outcome = "other"
            finding = _difference(expected, found) if sample.reader.sealed else None
    if Path(_EXECUTED).exists() or (sample.work / _EXECUTED).exists():
        finding = "the file ran a command"
        Path(_EXECUTED).unlink(missing_ok=True)
    return Result(number, finding, outcome)


def _difference(expected: str, found: str) -> str:
    at = next((n for n, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), 0)
    around = slice(max(0, at - 40), at + 60)
    return f"another conclusion without an error: {found[around]!r} for {expected[around]!r}"


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _watch(child: int, answers: int, first: int, deadline: float) -> Generator[Result, None, int]:
    """Pass the child's results on. Returns: the number of its last case."""
    current, begun, used = first, time.monotonic(), _processor_seconds(child)
    rest, finding, outcome = b"", None, ""
    try:
        while time.monotonic() < deadline:
            if select([answers], [], [], 0.5)[0]:
                data = os.read(answers, 1 << 16)
                if not data:
                    break
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    begun, used = time.monotonic(), _processor_seconds(child)
                    if line.isdigit():
                        current = int(line)
                        continue
                    answer = json.loads(line)
                    if "broken" in answer:
                        raise RuntimeError(answer["broken"])
                    yield Result(**answer)
            seconds = time.monotonic() - begun
            busy = _processor_seconds(child) - used
            if seconds > BLOCKED_SECONDS or min(seconds, busy) > LIMIT_SECONDS:
                finding, outcome = f"hangs: {seconds:.0f} s, {busy:.0f} s of them computing", "hang"
                break
    finally:
        os.close(answers)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL:
        finding, outcome = f"ended by signal {os.WTERMSIG(status)}", "crash"
    if finding is not None:
        yield Result(current, finding, outcome)
    return current


def _processor_seconds(process: int) -> float:
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0
