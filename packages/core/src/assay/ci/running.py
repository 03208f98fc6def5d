"""A job on a machine: its commands, tier by tier, and what they left."""

import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path

from assay.ci.configuration import Step
from assay.errors import AssayError
from assay.files import write_whole
from assay.foreign_text import escape_markdown, markdown_block, markdown_code
from assay.output.streams import print_error
from assay.report.junit import Case, Problem, Suite, make_suite, render_junit
from assay.report.page.html import write_index
from assay.report.run_report import Report, read_report, shown_path
from assay.report.text_formats import markdown_table, render_markdown_of
from assay.runs.results import VERDICT_FILE, read_verdict
from assay.verdicts import Outcome

JUNIT_FILE, SUMMARY_FILE = "junit.xml", "summary.md"

_WORDS = {0: "PASS", 1: "FAIL", 2: "error", 3: "NOT_COMPARED"}
_ERROR = 2
_MESSAGE = "assay: "  # begins the one line by which a command ends with an error


@dataclass(frozen=True)
class StepResult:
    """The end of one command."""

    step: Step
    words: tuple[str, ...]
    """The words after `assay`, without `--output`: it repeats the command."""
    folder: Path
    """The folder of its verdict."""
    code: int | None = None
    """0 PASS, 1 FAIL, 2 usage or environment error, 3 NOT_COMPARED; None if it was not started."""
    seconds: float | None = None
    failure: str = ""
    """The reason that it does not pass; "" for a pass."""
    unchecked: tuple[str, ...] = ()
    """The levels of which a PASS leaves a part unchecked."""


@dataclass(frozen=True)
class JobResult:
    """The end of a job."""

    target: str
    results: tuple[StepResult, ...]

    @property
    def exit_code(self) -> int:
        """The code of the worst command: 2, then 1, then 3, then 0."""
        codes = [result.code for result in self.results]
        return next(code for code in (2, 1, 3, 0) if code in codes)

    @property
    def title(self) -> str:
        """Return the machine, the outcome and what is unchecked in one line."""
        left = _describe_unchecked(chain.from_iterable(one.unchecked for one in self.results))
        waiting = sum(result.code is None for result in self.results)
        rest = f", {waiting} command{'s' if waiting > 1 else ''} not started" if waiting else ""
        return f"{self.target}: {_WORDS[self.exit_code]}{left}{rest}"

    @property
    def cells(self) -> list[dict[str, str]]:
        """Return the line of each command in every format, by column."""
        return [
            {
                "tier": one.step.tier,
                "command": one.step.name,
                "result": one.failure or f"PASS{_describe_unchecked(one.unchecked)}",
                "time": "" if one.seconds is None else f"{one.seconds:.0f} s",
            }
            for one in self.results
        ]


def run_steps(target: str, steps: Sequence[Step], root: Path, folder: Path) -> JobResult:
    """Run the commands of a job in `root`. A tier starts if those before it pass.

    steps: in the order of their tiers; at least one.
    folder: an absolute path; each command writes into a folder below it.
    """
    results: list[StepResult] = []
    for _, tier in groupby(steps, lambda step: step.tier):
        passes = not any(result.code for result in results)
        for step in tier:
            words = step.words_in(Path(shown_path(folder, root.resolve())))
            why = "not started: an earlier tier does not pass"
            waiting = StepResult(step, words, folder / step.name, failure=why)
            results.append(_run(waiting, root) if passes else waiting)
    return JobResult(target, tuple(results))


def _run(waiting: StepResult, root: Path) -> StepResult:
    own = waiting.folder
    print_error(f"{waiting.step.tier}: {shlex.join(('assay', *waiting.words))}")
    started = time.monotonic()
    command = [sys.executable, "-m", "assay.cli", *waiting.words, "--output", str(own)]
    with subprocess.Popen(
        command, cwd=root, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        complaint = _forward(process.stderr or ())
    code, failure = _judge(process.returncode, own)
    if process.returncode and code == _ERROR and complaint:
        failure = complaint
    reports = [] if code else read_reports(find_runs(own))[0]
    unchecked = tuple(name for report in reports for name in report.unchecked)
    seconds = time.monotonic() - started
    return replace(waiting, code=code, seconds=seconds, failure=failure, unchecked=unchecked)


def _forward(lines: Iterable[str]) -> str:
    """Print the standard error of a command as it comes. Returns: its last message, "" without one."""
    message = ""
    for line in lines:
        print_error(line.rstrip("\n"))
        if line.startswith(_MESSAGE):
            message = line.removeprefix(_MESSAGE).strip()
    return message


def _judge(exit_code: int, folder: Path) -> tuple[int, str]:
    """Return the code of a command, and why it does not pass. A success needs a verdict."""
    if exit_code:
        code = exit_code if exit_code in _WORDS else _ERROR
        return code, f"{_WORDS[code]}, exit code {exit_code}"
    if not (runs := find_runs(folder)):
        return _ERROR, "it left no verdict"
    failure = next(filter(None, map(find_contradiction, runs)), "")
    return (_ERROR if failure else 0), failure


def write_job(job: JobResult, folder: Path) -> str:
    """Write the summary, the JUnit file and the page of all runs into `folder`. Returns: the summary."""
    runs = [run for result in job.results for run in find_runs(result.folder)]
    reports, unreadable = read_reports(runs)
    write_index(reports, folder, job.title, job.cells)
    write_whole(folder / JUNIT_FILE, render_junit(_list_suites(job, reports, folder)))
    summary = "\n\n".join(_summarize(job, reports, unreadable, folder)) + "\n"
    write_whole(folder / SUMMARY_FILE, summary)
    return summary


def _summarize(
    job: JobResult, reports: list[Report], unreadable: list[str], folder: Path
) -> Iterator[str]:
    """Yield blocks of Markdown: each command's result, how to repeat failures, and all reports."""
    yield f"# {escape_markdown(job.title)}"
    yield markdown_table(job.cells)
    if failed := [result.words for result in job.results if result.code]:
        commands = "\n".join(shlex.join(("assay", *words)) for words in failed)
        yield "To repeat what does not pass:\n\n" + markdown_block(commands)
    yield from unreadable
    if reports:
        yield render_markdown_of(reports, folder).rstrip()


def _describe_unchecked(levels: Iterable[str]) -> str:
    names = ", ".join(dict.fromkeys(levels))
    return f" (partly unchecked: {names})" if names else ""


def _list_suites(job: JobResult, reports: list[Report], folder: Path) -> Iterator[Suite]:
    yield Suite(job.target, [_make_case(result) for result in job.results])
    for report in reports:
        parts = report.folder.relative_to(folder).parts
        yield make_suite(report, ".".join((job.target, *parts)))


def _make_case(result: StepResult) -> Case:
    problems: dict[int | None, Problem | None] = {0: None, 1: "failure"}
    problem, command = problems.get(result.code, "error"), shlex.join(("assay", *result.words))
    name = f"{result.step.tier}: {result.step.name}"
    return Case(name, problem, result.failure, command, result.seconds)


def find_runs(folder: Path) -> list[Path]:
    """Find the folders with a verdict at or below `folder`, without those inside another run."""
    return outermost(file.parent for file in sorted(folder.glob(f"**/{VERDICT_FILE}")))


def outermost(folders: Iterable[Path]) -> list[Path]:
    """Return the folders that are not inside another one."""
    known = list(folders)
    return [folder for folder in known if not any(other in folder.parents for other in known)]


def find_contradiction(run: Path) -> str:
    """Say why the verdict of a run contradicts the success of its command; "" if it does not."""
    name = str(run).rpartition("/runs/")[2]
    try:
        outcome = read_verdict(run).verdict
    except AssayError as error:
        return f"{name} has no verdict that can be read: {str(error).splitlines()[0]}"
    return "" if outcome is Outcome.PASS else f"{name} says {outcome.value}"


def read_reports(runs: Iterable[Path]) -> tuple[list[Report], list[str]]:
    """Read the reports of runs, worst first. Returns: also a sentence for each unreadable run."""
    reports, unreadable = [], []
    for folder in runs:
        try:
            reports.append(read_report(folder))
        except AssayError as error:
            unreadable.append(f"{markdown_code(folder.name)}: {markdown_code(str(error))}")
    reports.sort(key=lambda report: -report.verdict.verdict.severity)
    return reports, unreadable
