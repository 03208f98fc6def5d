"""`assay reproduce`: a failure as a folder that fails by itself."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.api.options import Option
from assay.cli.derived_commands import read_values, with_options
from assay.devices.run_string import Run, parse_run
from assay.errors import UsageError
from assay.output.streams import print_text
from assay.runs.results import GOLDEN_FOLDER, HERE_FOLDER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assay.recording.programs import ProgramPair
    from assay.replay.value_programs import Wanted
    from assay.runs import Progress
    from assay.sites import Phase
    from assay.verdicts import Location, Measurement, Verdict

    Record = Callable[[Wanted, Progress], list[ProgramPair]]

# How many places are tried.
_MOST_PLACES = 4
# Of a step's values: each is a program, and the smallest that fails is kept.
_MOST_PORTS = 8


@with_options
def reproduce(
    context: typer.Context,
    run: Annotated[Path, Option("The folder of a run that FAILs.", "RUN")],
    *,
    place: Annotated[
        int | None,
        Option(
            "Which of the places that the verdict names, from 0. Default: the first that fails by itself.",
            "N",
            minimum=0,
        ),
    ] = None,
    with_text: Annotated[bool, Option("The tensors may hold tokens of your --prompts.")] = False,
    output: Annotated[Path | None, Option("Default: RUN/reproduce.", "DIR")] = None,
) -> None:
    """Write a folder that shows the error of a failed run with torch alone.

    Example: assay reproduce runs/2026-11-02-check-generate

    `python DIR/reproduce.py` runs the operations that made the wrong value, and exits with 1. To record them,
    the candidate runs once more.

    Exit code: 0, or 2 if nothing in the run fails by itself.
    """
    from assay.judge.limits import load_limits
    from assay.judge.wording import describe_location, describe_place, describe_sides
    from assay.replay.value_programs import Wanted
    from assay.reproduce.folder import build, find_tokens, write
    from assay.reproduce.script import STATISTICS, Words
    from assay.runs import RunFolder, open_progress, removed_if_refused
    from assay.runs.results import read_measurements, read_verdict
    from assay.verdicts import Outcome

    verdict, (rows, complaints) = read_verdict(run), read_measurements(run)
    if verdict.verdict is not Outcome.FAIL:
        raise UsageError(f"{run} is {verdict.verdict}: only a FAIL can be reproduced")
    if complaints:
        raise UsageError(f"{run}: {complaints[0]}")
    candidate, limits_name, golden, record = _read_check(context, verdict, run)
    limits, holds_text = load_limits(limits_name), _holds_own_prompts(golden)
    by_name = {name: limits.of(statistic) for name, statistic in STATISTICS.items()}
    places = _places(verdict, place)
    folder = RunFolder.create("reproduce", output or run / "reproduce").path
    story = f"Found by assay: {describe_sides(verdict)}."
    reasons = []
    with removed_if_refused(), open_progress() as progress, TemporaryDirectory() as scratch:
        for number, location in enumerate(places):
            words = Words(f"{describe_location(location)} is wrong", story, candidate.device)
            traces = Path(scratch, str(number))
            traces.mkdir()
            wanted = Wanted(traces, location.step, _failed_ports(rows, location))
            if not wanted.ports:
                reasons.append(f"{describe_place(location)} was not found by one value of a step")
                continue
            # Values that must be equal have no token, and their place no step.
            pairs = record(wanted, progress) or record(_of_any_step(wanted), progress)
            with progress.step("makes it smaller"):
                found = build(pairs, candidate.dtype, by_name, words)
            is_private = holds_text and not with_text
            if not isinstance(found, str) and is_private and (tokens := find_tokens(found)):
                found = f"{', '.join(tokens)} would hold tokens of your prompts: add --with-text"
            if not isinstance(found, str):
                print_text(f"python {write(found, verdict, folder)}")
                return
            reasons.append(f"{describe_place(location)}: {found}")
        raise UsageError(f"{run} cannot be reproduced by one value: {'; '.join(reasons)}")


def _of_any_step(wanted: "Wanted") -> "Wanted":
    folder = wanted.folder / "any-step"
    folder.mkdir()
    return wanted._replace(folder=folder, step=None)


def _places(verdict: "Verdict", place: int | None) -> "list[Location]":
    """Return the place of suspect number `place`, or by default all, the worst first."""
    places = [one.location for one in verdict.suspects]
    if verdict.location is not None:
        places = [verdict.location, *(one for one in places if one != verdict.location)]
    if place is None:
        return places[:_MOST_PLACES]
    if place >= len(places):
        raise UsageError(f"--place {place}: the verdict names {len(places)} places")
    return [places[place]]


def _read_check(
    context: typer.Context, verdict: "Verdict", run: Path
) -> "tuple[Run, str, Path, Record]":
    """Return the candidate's run, the limits, the golden, and what records both sides of a run's check."""
    from assay.api import checks

    kind = " ".join(verdict.command[1:3])
    if kind not in ("check generate", "check train"):
        raise UsageError(
            f"{run} is of `assay {kind}`: only `check generate` and `check train` can be reproduced"
        )
    command: Any = context.find_root().command
    for name in kind.split():
        command = command.get_command(context, name)
    given = command.make_context(command.name, list(verdict.command[3:])).params
    del given["as_json"]
    golden, here = run / GOLDEN_FOLDER, run / HERE_FOLDER / GOLDEN_FOLDER
    if kind == "check generate":
        from assay.generate.record_programs import record_pairs

        check = checks.generate_check_of(read_values(checks.check_generate, given))
        golden = here if here.is_dir() else check.golden or golden
        record: Record = partial(record_pairs, replace(check, golden=golden))
        candidate, limits = check.candidate, check.limits
    else:
        from assay.training.program_pairs import record_pairs as record_training

        train = checks.train_check_of(read_values(checks.check_train, given))
        record = partial(record_training, replace(train, golden=golden))
        candidate, limits = parse_run(train.candidate), train.limits
    if not golden.is_dir():
        raise UsageError(f"{golden} was not kept: run the check again with --keep replay")
    return candidate, limits, golden, record


def _holds_own_prompts(golden: Path) -> bool:
    """Return True if a golden of generation has prompts of the user; the texts of training are assay's own."""
    from assay.generate.golden import MANIFEST, read_golden

    return (golden / MANIFEST).is_file() and read_golden(golden).inputs.prompts is not None


def _failed_ports(
    rows: "Sequence[Measurement]", location: "Location"
) -> "tuple[tuple[Phase, str, str], ...]":
    """Return phase, module and port of the values of a stage that are over a limit, the worst first.

    Without a module, the values of all modules in this phase.
    """
    from assay.judge.explain import over_limit

    failed = [
        row
        for row in rows
        if location.module in (None, row.module)
        and row.phase == location.phase
        and row.position is None
        and row.limit is not None
        and not row.ratio <= row.limit
    ]
    failed.sort(key=over_limit, reverse=True)
    ports = dict.fromkeys((row.phase, *_split(row.port, row.module)) for row in failed)
    return tuple(ports)[:_MOST_PORTS]


def _split(port: str, module: str) -> tuple[str, str]:
    """Return module and name of a port; one of the stage's own module is written without the module."""
    at, found, name = port.rpartition(":")
    return (at.replace("(model)", ""), name) if found else (module, port)
