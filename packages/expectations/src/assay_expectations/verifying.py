"""Verifies and compares expectations, and writes verdicts."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from assay.devices.run_string import parse_run
from assay.errors import UsageError
from assay.launch import call
from assay.runs import Progress
from assay.runs.results import write_results
from assay.verdicts import Verdict
from assay_expectations.capturing import OBSERVE
from assay_expectations.judging.changes import change_as_markdown
from assay_expectations.judging.verdicts import judge_pair, judge_seen
from assay_expectations.records import Expectation, read_expectation
from assay_expectations.requests import VerifyRequest

SHIPPED = Path(str(files("assay_expectations") / "shipped"))


def verify_expectations(
    paths: Sequence[Path],
    run: str,
    folder: Path,
    progress: Progress,
    setup: str | None = None,
    allow_unused: Sequence[str] = (),
) -> Verdict:
    """Verify the expectations in `paths`, by default the shipped ones, and write the verdict.

    setup: FILE.py:FUNC to call with each model before it runs.
    allow_unused: GLOBs of modules, parameters and experts that may stay uncompared.
    """
    parse_run(run)
    expectations = {file: read_expectation(file) for file in find_files(paths or [SHIPPED])}
    _require_unique_keys(expectations)
    request = VerifyRequest(files=[str(file) for file in expectations], run=run, setup=setup)
    (observations,) = call(OBSERVE, request, folder=folder, name="verify", progress=progress)
    verdict, rows = judge_seen(run, list(expectations.values()), observations, allow_unused)
    return write_results(verdict, rows, folder)


def diff_expectations(expected: Path, actual: Path, folder: Path) -> str:
    """Judge the capture `actual` by the expectation `expected`, and write the verdict.

    Returns: the change, as Markdown.
    """
    before, now = read_expectation(expected), read_expectation(actual)
    verdict, rows, change = judge_pair(before, now)
    write_results(verdict, rows, folder)
    return change_as_markdown(before, now, change)


def find_files(paths: Sequence[Path]) -> list[Path]:
    """List the files in `paths` and in its folders.

    Raises: UsageError for a missing path, or a folder without expectations.
    """
    found: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not inside or not inside[0].is_file():
            raise UsageError(f"{path} has no expectation; `assay expect capture` makes one")
        found += inside
    return found


def _require_unique_keys(expectations: dict[Path, Expectation]) -> None:
    known: dict[str, Path] = {}
    for file, expectation in expectations.items():
        key = expectation.model + expectation.key.model_dump_json()
        if key in known:
            raise UsageError(f"{known[key]} and {file} have the same key; delete one")
        known[key] = file
