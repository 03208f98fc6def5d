"""Measures suites in this environment, or in two that take turns, and compares the two.

A suite process runs one round of a suite per turn. In a block, a process of each environment takes turns.
"""

import math
import os
import random
import select
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any, Literal, Self, cast

import numpy as np
from pydantic import ConfigDict, Field, ValidationError
from rich.table import Table

from assay.errors import MachineError, UsageError
from assay.files import describe_invalid, read_sealed, write_sealed, write_whole
from assay.judge.levels import LevelResult, conclude, not_compared, not_run, outcome_of_levels
from assay.judge.wording import format_count
from assay.launch import SAME_HASHES, ProcessError, ask_python, end_command, own_variables
from assay.output.console import new_table
from assay.runs import Progress, provenance
from assay.verdicts import SCHEMA, Level, Outcome, Record, Verdict
from assay.watchdog import watched
from assay_bench.performance.records import (
    NUM_WARMUP_ROUNDS,
    RESULT_FILE,
    SUITES,
    PerformanceResult,
    SuiteEvent,
    SuiteRequest,
    SuiteResult,
    machine_kind,
    require_suites,
)
from assay_bench.underpowered import UNDERPOWERED, undecided_levels

# The first start can read torch's metadata from a cold disk.
_PROBE_SECONDS = 120

_PROBE = """
import json
from importlib.metadata import PackageNotFoundError, version
from assay_bench.performance.records import SUITES
def known(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"
print(json.dumps({
    "suites": list(SUITES),
    "versions": {name: known(name) for name in
                 ("torch", "transformers", "assay-core", "assay-bench", "numpy")},
}))
"""


def _make_no_python_error(path: Path) -> UsageError:
    return UsageError(
        f"{path} is not an environment: neither a folder with bin/python nor a Python executable"
    )


@dataclass(frozen=True, slots=True)
class Environment:
    """A Python environment with the suites."""

    name: str
    python: Path
    suites: Collection[str]
    """Names of its suites."""
    versions: Mapping[str, str]
    """Versions of the packages that affect speed."""
    variables: Mapping[str, str]
    """Environment variables of its processes."""

    @classmethod
    def current(cls) -> Self:
        """Return the environment of this process."""
        return cls("this environment", Path(sys.executable), list(SUITES), {}, dict(os.environ))

    @classmethod
    def at(cls, path: Path) -> Self:
        """Open a virtual environment by its folder or its Python executable.

        Raises: UsageError if it has no Python or no suites; MachineError if its
            Python does not respond.
        """
        python = find_python(path)
        try:
            answer, last = ask_python(python, _PROBE, _PROBE_SECONDS)
        except OSError as error:
            raise _make_no_python_error(path) from error
        except subprocess.TimeoutExpired as error:
            raise MachineError(f"{python} did not respond within {_PROBE_SECONDS} s") from error
        try:
            variables = own_variables(python, os.environ)
            return cls(str(path), python, answer["suites"], answer["versions"], variables)
        except (KeyError, TypeError):
            raise UsageError(
                f"{python} lacks the suites of assay-bench ({last or 'no output'}); install assay-bench there with pip"
            ) from None


def find_python(path: Path) -> Path:
    """Return the Python of a virtual environment, or the executable itself. Raises: UsageError."""
    candidates = [path / "bin" / "python", path / "Scripts" / "python.exe"]
    if path.is_file():
        candidates = [path]
    for candidate in candidates:
        if candidate.is_file() and os.access(candidate, os.X_OK):
            # Not resolved: Python finds a virtual environment by the path of the link.
            return candidate.absolute()
    raise _make_no_python_error(path)


# Enough for one round, and for loading and compiling a model before the first.
_ROUND_SECONDS = 1800.0


class SuiteProcess:
    """A running suite process. `suite_process` makes it."""

    def __init__(
        self, environment: Environment, log: Path, process: subprocess.Popen[bytes]
    ) -> None:
        self.skipped: dict[str, str] = {}
        """Reasons of suites that cannot run there."""
        self.waiting_for: str | None = None
        """The suite of the next round; None after the last suite."""
        self.results: list[SuiteResult] = []
        self.device: dict[str, Any] = {}
        self._environment, self._log, self._process = environment, log, process
        self._turns = cast("IO[bytes]", process.stdin)
        self._events = cast("IO[bytes]", process.stdout)

    def wait_until_ready(self) -> None:
        """Wait until the process can run a round or has ended.

        Raises: UsageError or MachineError that the process reports; MachineError if it writes nothing
            for half an hour; ProcessError with the end of the log if it failed.
        """
        self.waiting_for = None
        while (event := self._read_event()) is not None:
            if event.kind == "ready":
                self.waiting_for = event.suite
                return
            if event.kind == "skipped":
                self.skipped[event.suite] = event.reason
            elif event.result is not None:
                self.results.append(event.result)
                self.device = event.device
            else:
                raise (UsageError if event.kind == "usage" else MachineError)(event.reason)
        if code := self._process.wait():
            raise ProcessError.died("suite", code, self._log)

    def give_turn(self) -> None:
        """Let the process run a round, or begin the next suite. Returns at once."""
        with suppress(BrokenPipeError):  # the process ended, which `wait_until_ready` reports
            self._turns.write(b"\n")
            self._turns.flush()

    def run_round(self) -> None:
        """Let the process run a round, and wait for its end."""
        self.give_turn()
        self.wait_until_ready()

    def _read_event(self) -> SuiteEvent | None:
        """Read the next event; None after the last. Unbuffered, so that `select` sees every line."""
        if not select.select([self._events], [], [], _ROUND_SECONDS)[0]:
            raise MachineError(
                f"the suites of {self._environment.name} wrote nothing for {_ROUND_SECONDS:.0f} s;"
                f" log: {self._log}"
            )
        line = self._events.readline()
        try:
            return SuiteEvent.model_validate_json(line) if line else None
        except ValidationError as error:
            raise MachineError(
                f"{self._environment.name} has suites of another version: {describe_invalid(error, SuiteEvent)}"
            ) from None


@contextmanager
def suite_process(
    environment: Environment, request: SuiteRequest, folder: Path
) -> Iterator[SuiteProcess]:
    """Start a process for the suites of `request` in `environment`. The context ends it and its children.

    folder: an existing folder for the log.
    """
    worker = "import sys; from assay_bench.performance.suites import main; sys.exit(main())"
    log = folder / "suites.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [environment.python, "-P", "-c", worker, request.model_dump_json()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, bufsize=0,
            env={**environment.variables, **SAME_HASHES}, process_group=0,
        )  # fmt: skip
    with process, watched("group", process.pid):
        try:
            yield SuiteProcess(environment, log, process)
        finally:
            end_command(process)


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


class Block(Record):
    """One process of each environment, which took turns."""

    expected: list[SuiteResult]
    """Suites of A."""
    actual: list[SuiteResult]
    """Suites of B."""
    skipped: dict[str, dict[str, str]] = Field(default_factory=dict)
    """Reasons by environment, "A" or "B", and suite."""


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
    seed: int | None = None
    """Seed of the order of turns; None if the sides did not take turns."""
    blocks: list[Block]
    took_turns: bool = True
    """False for stored results, which were measured at different times."""
    provenance: dict[str, Any] = Field(default_factory=dict)


def compare_suite(suite: str, blocks: Sequence[Block], margin: float) -> SuiteComparison:
    """Compare one suite that both sides ran in all blocks. Too few blocks for an interval are underpowered."""
    pairs = [
        (one, other)
        for block in blocks
        for one in block.expected
        for other in block.actual
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

# Quads per block. More blocks narrow the interval further than more quads, because properties of a process,
# such as the addresses of its memory, change times by several percent.
NUM_QUADS = 16


def run_suites(request: SuiteRequest, folder: Path, progress: Progress) -> PerformanceResult:
    """Measure the suites of `request` in this environment, and write performance.json into `folder`.

    Raises: MachineError, with the end of the log, if a suite fails or none can run here.
    """
    with suite_process(Environment.current(), request, folder) as process:
        with progress.step(f"loading {request.model} on {request.run}"):
            process.wait_until_ready()
        while (suite := process.waiting_for) is not None:
            with progress.task(f"measuring {suite}", request.num_turns, "rounds") as task:
                while process.waiting_for == suite:
                    process.run_round()
                    task.advance()
    for reason in dict.fromkeys(process.skipped.values()):
        names = [name for name, one in process.skipped.items() if one == reason]
        progress.note(f"{', '.join(names)}: skipped: {reason}")
    if not process.results:
        reasons = "; ".join(dict.fromkeys(process.skipped.values()))
        raise MachineError(f"no suite can run here: {reasons}")
    origin = provenance()
    result = PerformanceResult(
        machine=machine_kind(process.device, origin["num_cpus"]),
        run=request.run,
        model=request.model,
        suites=process.results,
        skipped=process.skipped,
        device=process.device,
        versions=process.device["versions"],
        provenance=origin,
    )
    write_whole(folder / RESULT_FILE, result.to_json())
    return result


def turn_order(rng: random.Random) -> Iterator[Side]:
    """Yield the order of rounds in one block: the warm-up, then quads, each ABBA or BAAB.

    Both sides of a quad have the same mean position, so a steady drift slows both equally.
    """
    for _ in range(NUM_WARMUP_ROUNDS):
        yield from SIDES
    for _ in range(NUM_QUADS):
        first, second = rng.sample(SIDES, 2)
        yield from (first, second, second, first)


BLOCK_FILE, PLAN_FILE = "block.json", "plan.json"


class Plan(Record):
    """Identity of a comparison. Its folder keeps blocks of this one alone."""

    environments: list[str]
    request: SuiteRequest
    seed: int
    """Seed of the order of turns; block N adds N."""


def _open_plan(folder: Path, environments: Sequence[Environment], request: SuiteRequest) -> Plan:
    """Read the plan of an interrupted comparison, or write a new one. Raises: UsageError for another comparison."""
    seed = random.randrange(1 << 32)  # noqa: S311 - reproducible
    plan = Plan(environments=[str(one.python) for one in environments], request=request, seed=seed)
    if not (folder / PLAN_FILE).is_file():
        write_sealed(folder / PLAN_FILE, plan)
        return plan
    kept = read_sealed(Plan, folder / PLAN_FILE)
    if kept.model_copy(update={"seed": seed}) != plan:
        raise UsageError(
            f"{folder} holds a comparison of other environments, suites, runs or models: name a new folder"
            " with --output"
        )
    return kept


def compare_environments(
    environments: tuple[Environment, Environment],
    request: SuiteRequest,
    *,
    margin: float,
    num_blocks: int,
    folder: Path,
    progress: Progress,
) -> EnvironmentComparison:
    """Measure both environments, judge if a suite of the second is slower, and write ab.json into `folder`.

    request: suites, run and model; its number of rounds is ignored.
    margin: largest acceptable slow-down, as a share.
    Blocks that an interrupted run has measured there are kept.
    Raises: UsageError for too few blocks, a missing suite, or a folder of another comparison; UsageError or
        MachineError if a process fails.
    """
    require_blocks(num_blocks)
    for environment in environments:
        require_suites(request.suites, environment.suites, f"{environment.name}: ")
    plan = _open_plan(folder, environments, request)
    of_block = request.model_copy(update={"num_rounds": 2 * NUM_QUADS})
    blocks = []
    with progress.task("measuring A and B", num_blocks, "blocks") as task:
        for number in range(num_blocks):
            block_folder = folder / f"block{number}"
            kept = block_folder / BLOCK_FILE
            if kept.is_file():
                block = read_sealed(Block, kept)
            else:
                shutil.rmtree(block_folder, ignore_errors=True)
                rng = random.Random(plan.seed + number)  # noqa: S311 - reproducible
                block = _measure_block(environments, of_block, block_folder, rng)
                write_sealed(kept, block)
            blocks.append(block)
            task.advance()
    compared, not_compared, skipped = compare_blocks(blocks, request.suites, margin)
    result = EnvironmentComparison(
        margin=margin,
        suites=compared,
        not_compared=not_compared,
        skipped=skipped,
        environments={
            side: {"name": one.name, "versions": dict(one.versions)}
            for side, one in zip(SIDES, environments, strict=True)
        },
        run=request.run,
        model=request.model,
        seed=plan.seed,
        blocks=blocks,
        provenance=provenance(),
    )
    write_sealed(folder / COMPARISON_FILE, result)
    return result


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
            side: reasons[suite]
            for block in blocks
            for side, reasons in block.skipped.items()
            if suite in reasons
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


def _measure_block(
    environments: tuple[Environment, Environment],
    request: SuiteRequest,
    folder: Path,
    rng: random.Random,
) -> Block:
    with ExitStack() as stack:
        sides: dict[Side, SuiteProcess] = {}
        for side, environment in zip(SIDES, environments, strict=True):
            (folder / side).mkdir(parents=True)
            started = suite_process(environment, request, folder / side)
            sides[side] = stack.enter_context(started)
        for process in sides.values():
            process.wait_until_ready()
        while waiting := {p.waiting_for for p in sides.values() if p.waiting_for is not None}:
            suite = next(name for name in request.suites if name in waiting)
            _run_suite({side: p for side, p in sides.items() if p.waiting_for == suite}, rng)
        return Block(
            expected=sides["A"].results,
            actual=sides["B"].results,
            skipped={side: process.skipped for side, process in sides.items()},
        )


def _run_suite(sides: dict[Side, SuiteProcess], rng: random.Random) -> None:
    """Run all rounds of one suite on both sides, or on the side that does not skip it."""
    for side in turn_order(rng):
        if side in sides:
            sides[side].run_round()
    # Both at once, because the work before the next suite's first round is not measured.
    for process in sides.values():
        process.give_turn()
    for process in sides.values():
        process.wait_until_ready()


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
    control = [] if result.took_turns else ["READ B TO A"]
    table = new_table("SUITE", "B TO A", "95 % INTERVAL", *control, "VERDICT", wraps=False)
    for suite in result.suites:
        interval = "" if suite.lower is None else f"{suite.lower:.3f} to {suite.upper:.3f}"
        controls = [f"{suite.control_ratio:.3f}"] * len(control)
        table.add_row(suite.suite, f"{suite.ratio:.3f}", interval, *controls, suite.speed)
    others = dict.fromkeys(result.not_compared, "not compared")
    for name, word in (others | dict.fromkeys(result.skipped, "not run")).items():
        table.add_row(name, "", "", *[""] * len(control), word)
    return table


_OUTCOMES: dict[Speed, Outcome] = {
    "slower": Outcome.FAIL,
    "not slower": Outcome.PASS,
    "underpowered": Outcome.NOT_COMPARED,
}


def verdict_of(result: EnvironmentComparison) -> Verdict:
    """Return the verdict, with a level for each suite: FAIL if any is slower, PASS only if none can be."""
    num_blocks = len(result.blocks)
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
    limit, num_blocks = 1 + result.margin, len(result.blocks)
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
