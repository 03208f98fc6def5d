"""Measures suites in this environment, or in two that take turns, and compares the two.

A block is a run of `assay bench perf` in each environment.
"""

import math
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
from pydantic import ConfigDict, Field
from rich.table import Table

from assay.errors import MachineError, UsageError
from assay.files import read_sealed, write_sealed, write_whole
from assay.judge.levels import LevelResult, conclude, not_compared, not_run, outcome_of_levels
from assay.judge.wording import format_count
from assay.launch import ProcessError, RemoteFunction, call, end_command, own_variables
from assay.output.console import new_table
from assay.runs import Progress, provenance
from assay.verdicts import SCHEMA, Level, Outcome, Record, Verdict
from assay.watchdog import watched
from assay_bench.performance.records import (
    RESULT_FILE,
    Measured,
    PerformanceResult,
    SuiteRequest,
    SuiteResult,
    machine_kind,
)
from assay_bench.underpowered import UNDERPOWERED, undecided_levels


def find_python(path: Path) -> Path:
    """Return the Python of a virtual environment, or the executable itself. Raises: UsageError."""
    candidates = [path / "bin" / "python", path / "Scripts" / "python.exe"]
    if path.is_file():
        candidates = [path]
    for candidate in candidates:
        if candidate.is_file() and os.access(candidate, os.X_OK):
            # Not resolved: Python finds a virtual environment by the path of the link.
            return candidate.absolute()
    raise UsageError(
        f"{path} is not an environment: neither a folder with bin/python nor a Python executable"
    )


Speed = Literal["slower", "not slower", "underpowered"]

# Confidence of the interval for any symmetric distribution of the log ratios.
CONFIDENCE = 0.95

# With five blocks, the widest interval has a confidence of 1 - 2 / 2**5 = 93.75 %.
MIN_BLOCKS = 6

COMPARISON_FILE = "ab.json"


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


def judge_speed(lower: float, upper: float, margin: float) -> Speed:
    """Judge if B is slower by more than `margin`, a share: 0.05 for 5 %.

    lower, upper: interval of the time of B relative to A.
    Returns: underpowered if the interval contains 1 + margin, so that more blocks are needed.
    """
    if lower > 1 + margin:
        return "slower"
    return "not slower" if upper < 1 + margin else "underpowered"


# A run of A and one of B.
Block = tuple[PerformanceResult, PerformanceResult]


class SuiteComparison(Record):
    """The time of B relative to A in one suite."""

    suite: str
    speed: Speed
    ratio: float
    lower: float | None = None
    """Lower end of the interval of 95 % confidence; None for too few blocks."""
    upper: float | None = None
    block_ratios: list[float]
    """Fastest round of B over the fastest round of A in each block."""
    control_ratio: float
    """Read control of B over that of A."""


class EnvironmentComparison(Record):
    """The content of ab.json."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: int = Field(default=SCHEMA, alias="schema")
    margin: float
    """Largest acceptable slow-down of B, as a share."""
    suites: list[SuiteComparison]
    not_compared: dict[str, str] = Field(default_factory=dict)
    """Reasons of suites that only one side could run."""
    skipped: dict[str, str] = Field(default_factory=dict)
    """Reasons of suites that neither side could run."""
    environments: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Name and versions of A and B."""
    run: str
    model: str
    num_blocks: int
    took_turns: bool = True
    """False for stored results, of which all of one side may be older."""
    provenance: dict[str, Any] = Field(default_factory=dict)


def compare_suite(suite: str, blocks: Sequence[Block], margin: float) -> SuiteComparison:
    """Compare one suite that both sides ran in all blocks. Too few blocks for an interval are underpowered."""
    pairs = [
        (one, other)
        for expected, actual in blocks
        for one in expected.suites
        for other in actual.suites
        if one.suite == other.suite == suite
    ]
    ratios = [actual.fastest / expected.fastest for expected, actual in pairs]
    found = SuiteComparison(
        suite=suite,
        speed="underpowered",
        ratio=median(ratios),
        block_ratios=ratios,
        control_ratio=median(min(b.read_seconds) / min(a.read_seconds) for a, b in pairs),
    )
    if len(blocks) >= MIN_BLOCKS:
        found.ratio, found.lower, found.upper = ratio_interval(ratios)
        found.speed = judge_speed(found.lower, found.upper, margin)
    return found


Side = Literal["A", "B"]
SIDES: tuple[Side, Side] = ("A", "B")

_MEASURE: RemoteFunction[SuiteRequest, Measured] = RemoteFunction(
    "assay_bench.performance.suites:measure_suites"
)


def run_suites(request: SuiteRequest, folder: Path, progress: Progress) -> PerformanceResult:
    """Measure the suites of `request` in this environment, and write performance.json into `folder`.

    Raises: MachineError, with the end of the log, if a suite fails or none can run here.
    """
    (found,) = call(_MEASURE, request, folder=folder, name="suites", progress=progress)
    for reason in dict.fromkeys(found.skipped.values()):
        names = [name for name, one in found.skipped.items() if one == reason]
        progress.note(f"{', '.join(names)}: skipped: {reason}")
    if not found.results:
        reasons = "; ".join(dict.fromkeys(found.skipped.values()))
        raise MachineError(f"no suite can run here: {reasons}")
    origin = provenance()
    result = PerformanceResult(
        machine=machine_kind(found.device, origin["num_cpus"]),
        run=request.run,
        model=request.model,
        suites=found.results,
        skipped=found.skipped,
        device=found.device,
        versions=found.device["versions"],
        provenance=origin,
    )
    write_whole(folder / RESULT_FILE, result.to_json())
    return result


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
    pythons = [find_python(path) for path in environments]
    plan = Plan(environments=[str(python) for python in pythons], request=request)
    if not (folder / PLAN_FILE).is_file():
        write_sealed(folder / PLAN_FILE, plan)
    elif read_sealed(Plan, folder / PLAN_FILE) != plan:
        raise UsageError(
            f"{folder} holds a comparison of other environments, suites, runs or models: name a new folder"
            " with --output"
        )
    sides = [*zip(SIDES, pythons, strict=True)]
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


def compare_blocks(
    blocks: Sequence[Block], suites: Sequence[str], margin: float
) -> tuple[list[SuiteComparison], dict[str, str], dict[str, str]]:
    """Compare each suite that both sides ran.

    Returns: the comparisons; the reasons of the suites that one side skipped, and of those that both did.
    """
    compared: list[SuiteComparison] = []
    not_compared: dict[str, str] = {}
    skipped: dict[str, str] = {}
    for suite in suites:
        reasons = {
            side: run.skipped.get(suite, "not every run measured it")
            for block in blocks
            for side, run in zip(SIDES, block, strict=True)
            if all(one.suite != suite for one in run.suites)
        }
        sides = {
            reason: " and ".join(side for side in SIDES if reasons.get(side) == reason)
            for reason in reasons.values()
        }
        words = "; ".join(f"{names}: {reason}" for reason, names in sides.items())
        match len(reasons):
            case 0:
                compared.append(compare_suite(suite, blocks, margin))
            case 1:
                not_compared[suite] = words
            case _:
                skipped[suite] = words
    return compared, not_compared, skipped


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


def comparison_table(result: EnvironmentComparison) -> Table:
    """Make a table of the time of B relative to A, with one row per suite."""
    table = new_table("SUITE", "B TO A", "95 % INTERVAL", "READ B TO A", "VERDICT", wraps=False)
    for suite in result.suites:
        interval = "" if suite.lower is None else f"{suite.lower:.3f} to {suite.upper:.3f}"
        control = f"{suite.control_ratio:.3f}"
        table.add_row(suite.suite, f"{suite.ratio:.3f}", interval, control, suite.speed)
    others = dict.fromkeys(result.not_compared, "not compared")
    for name, word in (others | dict.fromkeys(result.skipped, "not run")).items():
        table.add_row(name, "", "", "", word)
    return table


_OUTCOMES: dict[Speed, Outcome] = {
    "slower": Outcome.FAIL,
    "not slower": Outcome.PASS,
    "underpowered": Outcome.NOT_COMPARED,
}


def verdict_of(result: EnvironmentComparison) -> Verdict:
    """Return the verdict, with a level for each suite: FAIL if any is slower, PASS only if none can be."""
    num_blocks = result.num_blocks
    levels = {
        one.suite: LevelResult(
            Level(verdict=_OUTCOMES[one.speed], reason=_reason(one, result), compared=num_blocks)
        )
        for one in result.suites
    }
    levels |= {name: not_compared(reason) for name, reason in result.not_compared.items()}
    levels |= {name: not_run(reason) for name, reason in result.skipped.items()}
    notes = []
    if not result.took_turns:
        notes.append(
            "A and B ran at different times, so a change of the machine is part of each ratio. READ B TO A is that of"
            " its own read bandwidth. `assay bench ab ENV_A ENV_B` lets two environments take turns"
        )
    first, second = (result.environments[side]["name"] for side in SIDES)
    return conclude(
        levels,
        None,
        model={"name": result.model},
        reference={"run": f"A: {first}"},
        candidate={"run": f"B: {second}, {result.run}"},
        notes=notes,
        compared=num_blocks * len(result.suites),
        compared_unit="blocks",
        headline=_headline(result, levels),
    )


def _headline(result: EnvironmentComparison, levels: Mapping[str, LevelResult]) -> str | None:
    limit = 1 + result.margin
    if slower := [suite.suite for suite in result.suites if suite.speed == "slower"]:
        return f"B takes more than {limit:g} times as long as A in {', '.join(slower)}."
    if undecided := undecided_levels(levels):
        return f"{UNDERPOWERED}: the intervals are too wide to decide {', '.join(undecided)}."
    if outcome_of_levels({name: one.level for name, one in levels.items()}) is Outcome.PASS:
        return f"Every suite of B takes less than {limit:g} times as long as in A."
    return None


def _reason(suite: SuiteComparison, result: EnvironmentComparison) -> str | None:
    """Describe the interval, and what to do if it does not decide."""
    limit, num_blocks = 1 + result.margin, result.num_blocks
    if suite.lower is None or suite.upper is None:
        return (
            f"underpowered: {format_count(num_blocks, 'run')} of each side; an interval needs at least {MIN_BLOCKS},"
            " as each run is one process"
        )
    interval = f"{CONFIDENCE:.0%} interval {suite.lower:.3f} to {suite.upper:.3f}"
    if suite.speed != "underpowered":
        return f"{interval} is above {limit:g}" if suite.speed == "slower" else None
    more = (
        f"--blocks {4 * num_blocks}" if result.took_turns else f"{4 * num_blocks} runs of each side"
    )
    return (
        f"underpowered: {interval} contains the limit of {limit:g};"
        f" {more} halve it, and an idle machine can narrow it further"
    )


def _cells(suite: SuiteResult) -> list[str]:
    return [
        f"{1000 * suite.fastest:.3g} ms",
        f"{suite.ratio:.3g} {suite.control}",
        f"{suite.tokens_per_second:,.0f}" if suite.num_tokens else "",
        f"{suite.flops_share:.1%}" if suite.num_flops else "",
        f"{suite.bytes_share:.1%}" if suite.num_bytes else "",
        f"{suite.peak_memory_bytes / _MEBIBYTE:,.0f} MiB" if suite.peak_memory_bytes else "",
    ]
