"""Whole commands in processes of their own, with mutated files and in hostile surroundings."""

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packages.core.tests.fuzz.cases import Sample
from packages.core.tests.fuzz.mutations.hostile_values import FORGED_LINE
from packages.core.tests.fuzz.reader import Reader

# Of a loaded machine: most of it is the start of Python, torch and worker processes.
LIMIT_SECONDS = 120.0

# All but newlines and tabs. Progress bars are for terminals, and no output is one here.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_ABSENT_DEVICE = "xpu/float32"
_ROOT = Path(__file__).resolve().parents[4]


@dataclass(frozen=True, slots=True)
class Command:
    """A command line. words: `{}` is the folder of the case, the mutated sample of `reader`."""

    reader: str
    words: str
    environment: Mapping[str, str] = field(default_factory=dict)
    output: str | None = None
    """A file for standard output."""

    @property
    def name(self) -> str:
        """The line as a person types it."""
        around = " ".join(f"{name}={value}" for name, value in self.environment.items())
        shown = f"{around} assay {self.words}".strip()
        return f"{shown} > {self.output}" if self.output else shown


_LATIN = {"PYTHONIOENCODING": "latin-1"}
_LONG = {"TMPDIR": "{}/" + "a" * 150}
_ABSENT = {"TMPDIR": "/absent"}
_READ_ONLY = {"TMPDIR": "/proc"}
_CHECK = "check generate micro:llama?trained=0 --output {}/out --candidate"
_SMALL = "cpu/float32 --reference cpu/float32 --max-new-tokens 2 --prompt-length 4"
_TRAIN = "--reference cpu/float32 --candidate cpu/float32 --steps 2 --output {}/out"

COMMANDS = (
    Command("verdict", "report {}"),
    Command("verdict", "report {} --json"),
    Command("verdict-without-digest", "report {}"),
    Command("verdict-without-digest", "report {} --markdown {}/summary.md", _LATIN),
    Command("measurements-without-digest", "report {} --output {}/page"),
    Command("verdict-without-digest", "report {}", output="/dev/full"),
    Command("golden", f"{_CHECK} cpu/float32 --golden {{}}/golden"),
    Command("golden", f"{_CHECK} cpu/float32 --no-verify --golden {{}}/golden"),
    Command("prompts", f"{_CHECK} {_SMALL} --prompts {{}}/prompts.jsonl"),
    Command("generation-config", f"{_CHECK} {_SMALL} --generation-config {{}}/generation_config.json"),
    Command("verdict", f"{_CHECK} {_SMALL}", _LONG),
    Command("verdict", f"{_CHECK} {_SMALL}", _ABSENT),
    Command("verdict", f"check train micro:llama {_TRAIN}", _LONG),
    Command("verdict", f"check train micro:llama {_TRAIN}", _READ_ONLY),
    Command("prompts", f"{_CHECK} {_ABSENT_DEVICE} --reference cpu/float32 --prompts {{}}/prompts.jsonl"),
    Command("limits", f"{_CHECK} {_ABSENT_DEVICE} --reference cpu/float32 --limits {{}}/limits.toml"),
    Command(
        "generation-config",
        f"{_CHECK} {_ABSENT_DEVICE} --reference cpu/float32"
        " --generation-config {}/generation_config.json",
    ),
    Command("model-loaded", "check load {} --output {}/out"),
    Command("model-folder-pickled", "check load {} --output {}/out"),
    Command("model-loaded", "check load {} --output {}/out", _LONG),
    Command("model-loaded", "check load {} --output {}/out", _ABSENT),
    Command("model-loaded", "check load {} --output {}/out", _READ_ONLY),
    Command("model-loaded", "check load {} --output {}/out", _LATIN),
    Command("clean-tokens", "calibrate {}/0/measurements.jsonl {}/1/measurements.jsonl --output {}/x.toml"),
    Command("expectation", "expect diff {}/old.json {}/new.json --output {}/out"),
    Command("expectation", "expect diff {}/old.json {}/new.json --output {}/out --markdown"),
    Command("expectations-page", "expect page {}/expectation.json --runs {}/runs --output {}/page.html"),
    Command("baseline", "bench compare {}/base.json {}/base.json --output {}/out"),
    Command("evaluation", "bench compare {} {} --output {}/out"),
    Command("own-evaluation", "bench accept {} {}/new.json --reason fuzz"),
    Command("suite", f"bench run --suite {{}}/suite.toml --run {_ABSENT_DEVICE} --output {{}}/out"),
    Command("suite", "bench run --task {}/sums.yaml --model micro:llama?trained=0 --limit 1 --output {}/out"),
    Command("recipe", f"bench tune {{}}/recipe.toml --run {_ABSENT_DEVICE} --output {{}}/out"),
    Command("library", "smoke run command:{}/library.toml -k no-such-case --output {}/out"),
    Command("event", f"runners plan {{}}/event.json --explain --root {_ROOT}"),
    Command("event", f"runners plan {{}}/event.json --root {_ROOT}", output="/dev/full"),
    Command("verdict", "devices", _LATIN),
    Command("verdict", "explain module-error", _LATIN, output="/dev/full"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ran:
    """A command that was run. problem: None where it ended as it should."""

    command: Command
    mutation: str
    code: int | None
    problem: str | None
    printed: str


def run_commands(
    readers: Mapping[str, Reader], seed: int, seconds: float, folder: Path
) -> Iterator[Ran]:
    """Run all commands, in an order that the seed chooses, as long as there is time."""
    deadline = time.monotonic() + seconds
    commands = list(enumerate(COMMANDS))
    random.Random(seed).shuffle(commands)  # noqa: S311 - reproducible
    for number, command in commands:
        if time.monotonic() > deadline:
            return
        sample = Sample(readers[command.reader], folder / str(number))
        yield run_command(command, sample, sample.mutate(seed, number))


def run_command(command: Command, sample: Sample, mutation: str) -> Ran:
    """Run one command on the mutated files in `sample.work`."""
    place = str(sample.work)
    environment = {name: value.replace("{}", place) for name, value in command.environment.items()}
    if environment.get("TMPDIR", "").startswith(place):
        Path(environment["TMPDIR"]).mkdir(parents=True)
    words = [word.replace("{}", place) for word in command.words.split()]
    log = sample.work.parent / "output"
    with log.open("wb") as stream, Path(command.output or log).open("ab") as output:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "assay.cli", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=stream,
                env={**os.environ, **environment},
                cwd=sample.work.parent,
                timeout=LIMIT_SECONDS,
                check=False,
            )
            code: int | None = done.returncode
        except subprocess.TimeoutExpired:
            code = None
    encoding = "latin-1" if "PYTHONIOENCODING" in environment else "utf-8"
    printed = log.read_bytes().decode(encoding, errors="replace")
    return Ran(command, mutation, code, problem_with(code, printed), printed)


def problem_with(code: int | None, printed: str) -> str | None:
    """Say what is wrong with how a command ended and what it printed."""
    if code not in (0, 1, 2, 3):
        return f"it ended with {code}" if code is not None else "it hangs"
    if "Traceback (most recent call last)" in printed or "this is a bug in assay" in printed:
        return "it prints a traceback"
    if any(line.lstrip().startswith(FORGED_LINE) for line in printed.splitlines()):
        return "it prints a line of the file as a command of CI"
    control = _CONTROL.search(printed)
    return f"it prints the control character {control[0]!r}" if control else None
