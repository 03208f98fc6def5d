"""Expectations from the outside: files, a process that runs the models, a folder with a verdict."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from assay.devices.run_string import parse_run
from assay.errors import UsageError
from assay.runs import Progress, run_process
from assay.runs.results import write_results
from assay.verdicts import Verdict
from assay_expectations.capturing import WORKER
from assay_expectations.judging.markdown import change_as_markdown
from assay_expectations.judging.verdicts import judge_pair, judge_seen
from assay_expectations.processes.requests import AllSeen, VerifyRequest
from assay_expectations.records import Expectation, read_expectation

SHIPPED = Path(str(files("assay_expectations") / "shipped"))


def verify_expectations(
    paths: Sequence[Path],
    run: str,
    folder: Path,
    progress: Progress,
    setup: str | None = None,
    allow_unused: Sequence[str] = (),
) -> Verdict:
    """Compare the models of `paths`, by default the shipped files, with their captures.

    setup: called with each model before it runs, as FILE.py:FUNC.
    allow_unused: GLOBs of modules, parameters and experts that may stay uncompared.
    """
    parse_run(run)
    expectations = {file: read_expectation(file) for file in find_files(paths or [SHIPPED])}
    _refuse_two_of_one_key(expectations)
    request = VerifyRequest(files=[str(file) for file in expectations], run=run, setup=setup)
    answer = run_process(
        WORKER, {"verify": request.model_dump()}, folder, name="verify", progress=progress
    )
    here = AllSeen.model_validate(answer.result)
    verdict, rows = judge_seen(run, list(expectations.values()), here, allow_unused)
    return write_results(verdict, rows, folder)


def diff_expectations(expected: Path, actual: Path, folder: Path) -> str:
    """Hold what was captured in one file to what was captured in the other.

    Returns: what changed, in Markdown.
    """
    before, now = read_expectation(expected), read_expectation(actual)
    verdict, rows, change = judge_pair(before, now)
    write_results(verdict, rows, folder)
    return change_as_markdown(before, now, change)


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The files among `paths` and in the folders among them.

    Raises: UsageError for a path that is not there, or a folder without expectations.
    """
    found: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not inside or not inside[0].is_file():
            raise UsageError(f"there is no expectation in {path}; `assay expect capture` makes one")
        found += inside
    return found


def _refuse_two_of_one_key(expectations: dict[Path, Expectation]) -> None:
    known: dict[str, Path] = {}
    for file, expectation in expectations.items():
        key = expectation.model + expectation.key.model_dump_json()
        if key in known:
            raise UsageError(f"{known[key]} and {file} have the same key; delete one")
        known[key] = file
