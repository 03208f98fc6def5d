"""Measures suites in this environment, and compares the speed of two sides.

Each run of `assay bench perf` is one process, and a process keeps some properties for life, such as the addresses of its
memory. So an interval needs several runs: the n-th run of A and the n-th of B form a block. Environments take turns on
this machine. Stored results ran at different times: a change of the machine between them is a part of their ratio.
"""

import math
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
from rich.table import Table

from assay.errors import MachineError, UsageError
from assay.files import file_digest, read_sealed, write_sealed, write_whole
from assay.judge.levels import LevelResult, conclude, failed, not_compared, not_run, passed, rows_of
from assay.judge.wording import format_count
from assay.launch import (
    ProcessError,
    RemoteFunction,
    call,
    end_command,
    find_python,
    own_variables,
)
from assay.output.console import new_table
from assay.progress import format_duration
from assay.runs import Progress, provenance
from assay.verdicts import Measurement, Outcome, Record, Verdict
from assay.watchdog import watched
from assay_bench.performance.records import (
    LEAST_SECONDS,
    RESULT_FILE,
    PerformanceResult,
    SuiteRequest,
    SuiteResult,
)
from assay_bench.results import UNDERPOWERED, merge_texts, undecided_levels, underpowered

_MEASURE: RemoteFunction[SuiteRequest, PerformanceResult] = RemoteFunction(
    "assay_bench.performance.suites:measure_suites"
)


def run_suites(request: SuiteRequest, folder: Path, progress: Progress) -> PerformanceResult:
    """Measure the suites of `request` in this environment, and write performance.json into `folder`.

    Raises: MachineError, with the end of the log, if a suite fails or none can run here.
    """
    (found,) = call(_MEASURE, request, folder=folder, name="suites", progress=progress)
    for text in merge_texts(found.skipped.items()):
        progress.note(f"skipped: {text}")
    if not found.suites:
        reasons = "; ".join(dict.fromkeys(found.skipped.values()))
        raise MachineError(f"no suite can run here: {reasons}")
    result = found.model_copy(update={"provenance": provenance()})
    write_whole(folder / RESULT_FILE, result.to_json())
    return result


_MEBIBYTE = 1 << 20


def performance_table(result: PerformanceResult) -> Table:
    """Make a table with one row per suite."""
    headings = "SUITE", "FASTEST", "TO CONTROL", "TOKENS/S", "OF MATMUL", "OF READ", "PEAK"
    table = new_table(*headings, wraps=False)
    for suite in result.suites:
        table.add_row(suite.suite, *_cells(suite))
    for name in result.skipped:
        table.add_row(name, "skipped")
    return table


def _cells(suite: SuiteResult) -> list[str]:
    return [
        f"{1000 * suite.fastest:.3g} ms",
        f"{suite.ratio:.3g} {suite.control}",
        f"{suite.tokens_per_second:,.0f}" if suite.num_tokens else "",
        f"{suite.flops_share:.1%}" if suite.num_flops else "",
        f"{suite.bytes_share:.1%}" if suite.num_bytes else "",
        f"{suite.peak_memory_bytes / _MEBIBYTE:,.0f} MiB" if suite.peak_memory_bytes else "",
    ]


def find_stored(path: Path) -> list[Path]:
    """Return performance.json of a run's folder, or of the runs in a folder; an empty list for anything else."""
    own = path / RESULT_FILE
    return [own] if own.is_file() else sorted(path.glob(f"*/{RESULT_FILE}"))


def read_sides(
    first: Path, second: Path
) -> tuple[list[PerformanceResult], list[PerformanceResult]]:
    """Read the runs of both sides, each in the order of their dates.

    Raises: UsageError if the runs of a side measured different things, or a run is there twice.
    """
    if first.resolve() == second.resolve():
        raise UsageError(f"{first} is both A and B: measure B with `assay bench perf`")
    known: dict[str, Path] = {}
    for file in (*find_stored(first), *find_stored(second)):
        original = known.setdefault(file_digest(file), file)
        if original is not file:
            raise UsageError(
                f"{file.parent} is a copy of {original.parent}, and an interval needs independent processes:"
                " remove it, or measure again with `assay bench perf`"
            )
    return _read_side(first), _read_side(second)


def _read_side(path: Path) -> list[PerformanceResult]:
    results = [read_sealed(PerformanceResult, file) for file in find_stored(path)]
    if not results:
        raise UsageError(f"{path} holds no {RESULT_FILE} of `assay bench perf`")
    _require_alike(results, ("machine", "model", "run", "versions"), str(path))
    return sorted(results, key=lambda one: str(one.provenance.get("date", "")))


def _require_alike(results: Sequence[PerformanceResult], names: Sequence[str], where: str) -> None:
    for name in names:
        values = {str(getattr(one, name)): None for one in results}
        if len(values) > 1:
            raise UsageError(f"{where}: not comparable, different {name}: {'; '.join(values)}")


def require_python(path: Path) -> Path:
    """Return the Python of a side. Raises: UsageError."""
    python = find_python(path)
    if python is None:
        raise UsageError(
            f"{path} is neither a folder with bin/python, a Python executable, nor a folder with finished runs of"
            " `assay bench perf`"
        )
    return python


SIDES = "A", "B"

PLAN_FILE = "plan.json"


class Plan(Record):
    """Identity of a comparison. Its folder keeps runs of this one alone."""

    environments: list[str]
    request: SuiteRequest


def measure_environments(
    environments: tuple[Path, Path],
    request: SuiteRequest,
    *,
    num_blocks: int,
    folder: Path,
    progress: Progress,
) -> tuple[Path, Path]:
    """Run `assay bench perf` in both environments in turn. Runs that an interrupted comparison has made are kept.

    Returns: the folders of the runs of A and of B.
    Raises: UsageError for a folder of another comparison; ProcessError, with the end of the log, if a run fails.
    """
    pythons = [require_python(path) for path in environments]
    plan = Plan(environments=[str(python) for python in pythons], request=request)
    if not (folder / PLAN_FILE).is_file():
        write_sealed(folder / PLAN_FILE, plan)
    elif read_sealed(Plan, folder / PLAN_FILE) != plan:
        raise UsageError(
            f"{folder} holds a comparison of other environments, suites, runs or models: name a new folder"
            " with --output"
        )
    sides = [*zip(SIDES, pythons, strict=True)]
    num_left = 2 * num_blocks - sum(len(find_stored(folder / side)) for side in SIDES)
    least = format_duration(max(num_left, 0) * len(request.suites) * LEAST_SECONDS)
    suites = format_count(len(request.suites), "suite")
    progress.note(f"more than {least}: {format_count(num_left, 'run')} of {suites}")
    with progress.task("measuring A and B", 2 * num_blocks, "runs") as task:
        for number in range(num_blocks):
            # ABBA: a steady drift of the machine slows both sides equally.
            for side, python in sides if number % 2 == 0 else sides[::-1]:
                output = folder / side / f"{number:03}"
                if not (output / RESULT_FILE).is_file():
                    _run_perf(python, request, output)
                task.advance()
    return folder / SIDES[0], folder / SIDES[1]


def _run_perf(python: Path, request: SuiteRequest, output: Path) -> None:
    shutil.rmtree(output, ignore_errors=True)
    output.parent.mkdir(exist_ok=True)
    log = output.with_suffix(".log")
    suites = [word for suite in request.suites for word in ("--suite", suite)]
    words = ["--run", request.run, "--model", request.model, *suites, "--output", str(output)]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [python, "-P", "-m", "assay.cli", "bench", "perf", *words],
            stdout=stream, stderr=stream, env=own_variables(python, os.environ), process_group=0,
        )  # fmt: skip
    with process, watched("group", process.pid):
        try:
            code = process.wait()
        finally:
            end_command(process)
    if code:
        raise ProcessError.died(f"assay bench perf of {python}", code, log)


# Confidence of the interval for any symmetric distribution of the log ratios.
CONFIDENCE = 0.95

# With five blocks, the widest interval has a confidence of 1 - 2 / 2**5 = 93.75 %.
MIN_BLOCKS = 6


def require_blocks(num_blocks: int) -> None:
    """Raise UsageError if there are too few blocks for an interval."""
    if num_blocks < MIN_BLOCKS:
        raise UsageError(
            f"{num_blocks} blocks are too few for an interval of {CONFIDENCE:.0%} confidence; at least"
            f" {MIN_BLOCKS} are needed"
        )


def ratio_interval(block_ratios: Sequence[float]) -> tuple[float, float, float]:
    """Compute the Hodges-Lehmann estimate of the blocks' common ratio, and its exact interval.

    block_ratios: one positive ratio per block. Blocks are independent because they are different
        processes; the rounds inside of a block are not.
    Returns: the estimate, and the lower and upper end of an interval of at least 95 % confidence.
    Raises: UsageError.
    Source: Hollander, Wolfe & Chicken, Nonparametric Statistical Methods, 3.2-3.3 (intervals from the
        signed-rank test).
    """
    require_blocks(len(block_ratios))
    logs = [math.log(ratio) for ratio in block_ratios]
    averages = sorted((one + other) / 2 for n, one in enumerate(logs) for other in logs[n:])
    # The statistic is a sum of ranks, each with probability 1/2. It counts the averages on one side of a center.
    chances = np.ones(1)
    for rank in range(1, len(logs) + 1):
        chances = np.convolve(chances, [0.5, *[0.0] * (rank - 1), 0.5])
    num_excluded = int(np.searchsorted(np.cumsum(chances), (1 - CONFIDENCE) / 2, side="right"))
    ends = median(averages), averages[num_excluded - 1], averages[-num_excluded]
    ratio, lower, upper = map(math.exp, ends)
    return ratio, lower, upper


# A run of A and one of B.
Block = tuple[PerformanceResult, PerformanceResult]


def judge_suite(suite: str, blocks: Sequence[Block], margin: float, more: str) -> LevelResult:
    """Judge if B is slower than A by more than `margin`, a share: 0.05 for 5 %.

    more: what to raise if the interval contains 1 + margin.
    Returns: FAIL or PASS if the interval of the ratio lies above or below 1 + margin. If the machine's read bandwidth
        changed between the sides, by an interval without 1, its whole change widens these limits. One side that did not
        run the suite is not compared; a suite that neither side ran is not run.
    """
    reasons = {
        side: run.skipped.get(suite, "not every run measured it")
        for block in blocks
        for side, run in zip(SIDES, block, strict=True)
        if all(one.suite != suite for one in run.suites)
    }
    if reasons:
        words = "; ".join(merge_texts(sorted(reasons.items())))
        return not_compared(words) if len(reasons) == 1 else not_run(words)
    pairs = [
        tuple(next(one for one in run.suites if one.suite == suite) for run in block)
        for block in blocks
    ]
    ratios = [actual.fastest / expected.fastest for expected, actual in pairs]
    reads = [min(b.read_seconds) / min(a.read_seconds) for a, b in pairs]
    num_blocks, limit = len(blocks), 1 + margin
    if num_blocks < MIN_BLOCKS:
        ratio, interval = median(ratios), ""
        level = underpowered(
            f"{format_count(num_blocks, 'run')} of each side; an interval needs at least {MIN_BLOCKS}, as each run is"
            " one process",
            num_blocks,
        )
    else:
        ratio, lower, upper = ratio_interval(ratios)
        interval = f"{lower:.3f} to {upper:.3f}"
        words = f"{CONFIDENCE:.0%} interval {interval}"
        read, least_read, most_read = ratio_interval(reads)
        if lower > limit * (most_read if least_read > 1 else 1.0):
            level = failed(num_blocks, f"{words} is above {limit:g}")
        elif upper < limit * (least_read if most_read < 1 else 1.0):
            level = passed(num_blocks)
        elif lower > limit or upper < limit:
            level = underpowered(
                f"{words} is not beyond the change of the machine: READ B TO A, the same pass over memory, is {read:.3f}"
                f" ({least_read:.3f} to {most_read:.3f}); repeat it on an idle machine",
                num_blocks,
            )
        else:
            level = underpowered(
                f"{words} contains the limit of {limit:g}; {more} halve it, and an idle machine can narrow it further",
                num_blocks,
            )
    numbers = {
        "B to A": f"{ratio:.3f}",
        "95 % interval": interval,
        "read B to A": f"{median(reads):.3f}",
    }
    rows = [
        Measurement(
            level=suite, module="", port="block", order=number, statistic="seconds",
            actual=actual.fastest, expected=expected.fastest, ratio=ratios[number],
        )
        for number, (expected, actual) in enumerate(pairs)
    ]  # fmt: skip
    measured = level.level.model_copy(update={"measures": [numbers]})
    return LevelResult(measured).with_rows(rows)


_DRIFT = (
    "A and B ran at different times, so a change of the machine is part of each ratio. READ B TO A is that of its own read"
    " bandwidth. `assay bench ab ENV_A ENV_B` lets two environments take turns"
)


def compare_sides(
    sides: tuple[list[PerformanceResult], list[PerformanceResult]],
    paths: tuple[Path, Path],
    *,
    suites: Sequence[str],
    margin: float,
    took_turns: bool,
) -> tuple[Verdict, list[Measurement]]:
    """Judge if a suite of B is slower than in A: FAIL if any is, PASS only if none can be.

    paths: names of the sides. suites: those to compare, of which each may be absent.
    took_turns: False for stored results, of which all of one side may be older.
    Returns: the verdict with a level for each suite, and a measurement for each block.
    Raises: UsageError for another machine or model.
    """
    first, second = sides[0][0], sides[1][0]
    _require_alike((first, second), ("machine", "model"), f"{paths[0]} and {paths[1]}")
    runs = (*sides[0], *sides[1])
    known = {name for run in runs for name in (*(one.suite for one in run.suites), *run.skipped)}
    blocks = [*zip(*sides, strict=False)]
    more = f"{4 * len(blocks)} runs of each side"
    if took_turns:
        more = f"--blocks {4 * len(blocks)}"
    levels = {suite: judge_suite(suite, blocks, margin, more) for suite in suites if suite in known}
    verdict = conclude(
        levels,
        model={"name": first.model},
        reference={"run": f"A: {paths[0]}"},
        candidate={"run": f"B: {paths[1]}, {' and '.join(dict.fromkeys((first.run, second.run)))}"},
        notes=[] if took_turns else [_DRIFT],
        compared_unit="blocks",
    )
    return verdict.model_copy(update={"headline": _headline(verdict, levels, 1 + margin)}), rows_of(
        levels
    )


def _headline(verdict: Verdict, levels: dict[str, LevelResult], limit: float) -> str | None:
    if slower := [name for name, one in levels.items() if one.is_failed]:
        return f"B takes more than {limit:g} times as long as A in {', '.join(slower)}."
    if undecided := undecided_levels(levels):
        return f"{UNDERPOWERED}: the intervals do not decide {', '.join(undecided)}."
    if verdict.verdict is Outcome.PASS:
        return f"Every suite of B takes less than {limit:g} times as long as in A."
    return None


def comparison_table(verdict: Verdict) -> Table:
    """Make a table of the time of B relative to A, with one row per suite."""
    table = new_table("SUITE", "B TO A", "95 % INTERVAL", "READ B TO A", "VERDICT", wraps=False)
    for name, level in verdict.levels.items():
        (numbers,) = (level.model_extra or {}).get("measures") or [dict.fromkeys(range(3), "")]
        word = _SPEEDS.get(level.verdict) if level.compared else "not compared"
        table.add_row(name, *numbers.values(), word if level.verdict else "not run")
    return table


_SPEEDS: dict[Outcome | None, str] = {
    Outcome.FAIL: "slower",
    Outcome.PASS: "not slower",
    Outcome.NOT_COMPARED: UNDERPOWERED,
}
