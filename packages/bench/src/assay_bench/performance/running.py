"""Measurement of suites: in this environment, or in blocks of two that take turns."""

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from assay.devices.run_string import parse_run
from assay.errors import MachineError
from assay.files import write_whole
from assay.models.sources import resolve_model
from assay.runs import Progress, provenance
from assay_bench.performance.comparing import (
    COMPARISON_FILE,
    Block,
    EnvironmentComparison,
    SuiteComparison,
    compare_suite,
    overall,
    require_blocks,
)
from assay_bench.performance.environments import Environment, SuiteProcess, suite_process
from assay_bench.performance.records import (
    NUM_WARMUP_ROUNDS,
    RESULT_FILE,
    PerformanceResult,
    SuiteRequest,
    machine_kind,
)

Side = Literal["A", "B"]
_SIDES: tuple[Side, Side] = ("A", "B")

# Quads per block. More blocks narrow the interval further than more quads, because properties of a process,
# such as the addresses of its memory, change times by several percent.
NUM_QUADS = 16


def run_suites(request: SuiteRequest, folder: Path, progress: Progress) -> PerformanceResult:
    """Measure the suites of `request` in this environment, and write performance.json into `folder`.

    Raises: UsageError for an unknown run or model; MachineError, with the end of the log, if a suite
        fails or none can run here.
    """
    parse_run(request.run)
    resolve_model(request.model)
    with suite_process(Environment.current(), request, folder) as process:
        with progress.step(f"loads {request.model} on {request.run}"):
            process.wait_until_ready()
        while (suite := process.waiting_for) is not None:
            with progress.task(f"measures {suite}", request.num_turns, "rounds") as task:
                while process.waiting_for == suite:
                    process.run_round()
                    task.advance()
    for name, reason in process.skipped.items():
        progress.note(f"{name}: skipped: {reason}")
    if not process.results:
        raise MachineError(f"no suite can run here: {'; '.join(process.skipped.values())}")
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
        yield from _SIDES
    for _ in range(NUM_QUADS):
        first, second = rng.sample(_SIDES, 2)
        yield from (first, second, second, first)


def compare_environments(
    environments: tuple[Environment, Environment],
    request: SuiteRequest,
    *,
    margin: float,
    num_blocks: int,
    folder: Path,
    progress: Progress,
) -> EnvironmentComparison:
    """Measure both environments, judge if the second is slower, and write ab.json into `folder`.

    request: suites, run and model; its number of rounds is ignored.
    margin: largest acceptable slow-down, as a share.
    Raises: UsageError for too few blocks or a missing suite; UsageError or MachineError if a
        process fails.
    """
    parse_run(request.run)
    require_blocks(num_blocks)
    for environment in environments:
        environment.require(request.suites)
    seed = random.randrange(1 << 32)  # noqa: S311 - reproducible
    rng = random.Random(seed)  # noqa: S311 - reproducible
    of_block = request.model_copy(update={"num_rounds": 2 * NUM_QUADS})
    blocks = []
    with progress.task("measures A and B", num_blocks, "blocks") as task:
        for number in range(num_blocks):
            block_folder = folder / f"block{number}"
            blocks.append(_measure_block(environments, of_block, block_folder, rng))
            task.advance()
    compared, not_compared, skipped = compare_blocks(blocks, request.suites, margin)
    result = EnvironmentComparison(
        verdict=overall(compared, not_compared),
        margin=margin,
        suites=compared,
        not_compared=not_compared,
        skipped=skipped,
        environments={
            side: {"name": one.name, "versions": dict(one.versions)}
            for side, one in zip(_SIDES, environments, strict=True)
        },
        run=request.run,
        model=request.model,
        seed=seed,
        blocks=blocks,
        provenance=provenance(),
    )
    write_whole(folder / COMPARISON_FILE, result.to_json())
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
        words = "; ".join(f"{side}: {reason}" for side, reason in sorted(reasons.items()))
        match len(reasons):
            case 0:
                compared.append(compare_suite(suite, blocks, margin))
            case 1:
                not_compared[suite] = f"only one side could run it; {words}"
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
        for side, environment in zip(_SIDES, environments, strict=True):
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
