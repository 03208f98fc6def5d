"""The commands and examples in the blocks of documents."""

import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"(?:# |\"\"\")([\w/]+\.\w+)\b")
_PROGRAMS = {
    "assay": ["-m", "assay.cli"],
    "python": [],
    "python3": [],
    "pytest": ["-m", "pytest", "-p", "no:cacheprovider"],
}
_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*\.?\d*(?:e-?\d+)?")
_DURATION = re.compile(r"\b[\d.]+ ?s\b.*")
# How an expectation was rounded at its capture depends on the processor: 405 on an AMD EPYC, 484 on an Intel Xeon.
_RATIO_TO_CAPTURE = re.compile(r"\b[\d,.]+x (?=the error of the captured run)")
_TOLERANCE = 0.1  # relative, of the numbers of a verdict on another machine


def shell_commands(document: str) -> Iterator[list[str]]:
    """The words of every command in the shell blocks of a Markdown text."""
    for kind, block in _BLOCK.findall(document):
        if kind in ("bash", "sh", "shell", "console"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                yield from split_list(words)


def split_list(words: list[str]) -> Iterator[list[str]]:
    """The single commands of `a && b`."""
    while "&&" in words:
        yield words[: words.index("&&")]
        words = words[words.index("&&") + 1 :]
    if words:
        yield words


def follow(document: str, folder: Path) -> int:
    """Follow the examples of a Markdown text in `folder`, as a reader would.

    A block whose first line names a file is saved. Each block `bash` runs: `sh` is for what a test cannot run. A block
    `text` after it must be what its last command prints, which fails if the text shows a failure.

    Returns: the number of compared outputs.
    """
    blocks = _BLOCK.findall(document)
    num_compared = 0
    for (kind, text), (next_kind, shown) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if named := _FILE.match(text):
            file = folder / named[1]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        if kind != "bash":
            continue
        lines = shown.splitlines() if next_kind == "text" else []
        *first, last = shell_commands(f"```bash\n{text}```\n")
        for command in first:
            _run(command, folder, code=0)
        fails = any(re.match(r"✗|FAIL|=+ \d+ failed", line) for line in lines)
        printed = _run(last, folder, code=int(fails))
        if lines:
            assert_shown(printed, lines)
            num_compared += 1
    return num_compared


def assert_shown(printed: list[str], shown: list[str]) -> None:
    """Assert that `printed` begins with the lines `shown`, in which [...] stands for any lines.

    The numbers of a verdict may differ by 10 %, and its lines about the worst place and its notes are not compared:
    both depend on the machine.
    """
    is_verdict = shown[0][:1] in tuple("✓✗?")
    left = [line for line in printed if not (is_verdict and _is_of_machine(line))]
    skips = False
    for line in shown:
        if line == "[...]":
            skips = True
        elif not (is_verdict and _is_of_machine(line)):
            while skips and left and not _is_like(left[0], line, exactly=not is_verdict):
                left.pop(0)
            assert left, f"the document shows {line!r}, which is not printed in {printed}"
            assert _is_like(left[0], line, exactly=not is_verdict), (left[0], line)
            left.pop(0)
            skips = False


def _run(command: list[str], folder: Path, *, code: int) -> list[str]:
    program, *arguments = command
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    programs = str(Path(sys.executable).parent)  # of commands that start python3
    ended = subprocess.run(
        [sys.executable, *_PROGRAMS[program], *arguments],
        cwd=folder,
        env=environment | {"PATH": os.pathsep.join((programs, environment["PATH"]))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == code, f"{command}: {ended.stdout}\n{ended.stderr}"
    return [line.rstrip() for line in ended.stdout.splitlines()]


def _is_of_machine(line: str) -> bool:
    return line.strip().startswith(("worst ", "nearest ", "note: "))


def _is_like(printed: str, shown: str, *, exactly: bool) -> bool:
    printed, shown = (_DURATION.sub("", line).replace("=", "") for line in (printed, shown))
    if exactly:
        return printed == shown
    printed, shown = (_RATIO_TO_CAPTURE.sub("", line) for line in (printed, shown))
    numbers = [[_value_of(one) for one in _NUMBER.findall(line)] for line in (printed, shown)]
    words = [_NUMBER.split(line) for line in (printed, shown)]
    return words[0] == words[1] and all(
        math.isclose(*pair, rel_tol=_TOLERANCE) for pair in zip(*numbers, strict=True)
    )


def _value_of(number: str) -> float:
    return float(number.replace(",", ""))
