"""`assay reproduce`: a failure as a folder that fails by itself."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from assay.api.options import Option
from assay.cli.derived_commands import read_values, with_options
from assay.devices.run_string import parse_run
from assay.errors import UsageError
from assay.output.streams import print_text
from assay.runs.results import GOLDEN_FOLDER, HERE_FOLDER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from assay.recording.programs import ProgramPair
    from assay.replay.value_programs import Wanted
    from assay.reproduce.script import Words
    from assay.reproduce.wrong_values import WrongValue
    from assay.runs import Progress
    from assay.sites import Phase
    from assay.verdicts import Location, Measurement, Verdict

    Attempt = Callable[[Words, Progress], "Write | str"]
    Record = Callable[[Wanted, Progress], list[ProgramPair]]
    Find = Callable[[Phase, Path, Progress], list[WrongValue]]
    Write = Callable[[Verdict, Path], Path]

# How many places are tried.
_MOST_PLACES = 4
# Of a step's values: each is a program, and the smallest that fails is kept.
_MOST_PORTS = 8
# Statistics of steps without recorded values, whose errors no single module makes.
_OF_FREE_RUNS = ("trajectory-error", "loss-error")

_BY_THE_LOADER = "no operation of torch hands out the inputs"


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
    """Write a script that shows a run's error with torch alone.

    Example: assay reproduce runs/2026-11-02-check-generate

    `python DIR/reproduce.py` runs the operations that made the wrong value, and exits with 1. To record them,
    the candidate runs once more.

    Exit code: 0, or 2 if nothing in the run fails by itself.
    """
    from assay.judge.wording import describe_location, describe_place, describe_sides
    from assay.replay.value_programs import Wanted
    from assay.reproduce.script import Words
    from assay.runs import RunFolder, open_progress, removed_if_refused
    from assay.runs.results import read_measurements, read_verdict
    from assay.verdicts import Outcome

    verdict, (rows, complaints) = read_verdict(run), read_measurements(run)
    if verdict.verdict is not Outcome.FAIL:
        raise UsageError(f"{run} is {verdict.verdict}: only a FAIL can be reproduced")
    if complaints:
        raise UsageError(f"{run}: {complaints[0]}")
    check, places = _read_check(context, verdict, run), _places(verdict, place)
    why = next((one.reason for one in verdict.levels.values() if one.verdict is Outcome.FAIL), None)
    # Inputs of no module are those that a loader hands out: no value shows their error.
    of_loader = any(one.phase == "inputs" and one.module is None for one in places[:1])
    if of_loader and why and check.record is not None:
        raise UsageError(f"{run} cannot be reproduced: {why}, and {_BY_THE_LOADER}")
    folder = RunFolder.create("reproduce", output or run / "reproduce").path
    story = f"Found by assay: {describe_sides(verdict)}."
    reasons: list[str] = []
    with removed_if_refused(), open_progress() as progress, TemporaryDirectory() as scratch:
        for number, location in enumerate(places):
            words = Words(f"{describe_location(location)} is wrong", story, check.device)
            traces = Path(scratch, str(number))
            traces.mkdir()
            is_of_state = location.phase == "checkpoint" or verdict.diagnosis == "weight-mismatch"
            attempts: list[Attempt] = []
            if check.record is not None and (ports := _failed_ports(rows, location)):
                wanted = Wanted(traces, location.step, ports)
                attempts.append(partial(_reproduce_programs, check, wanted, with_text))
            if is_of_state or number == 0:
                of_state = partial(_reproduce_state, check, location, traces)
                attempts.insert(0 if is_of_state else 1, of_state)
            for attempt in attempts:
                found = attempt(words, progress)
                if not isinstance(found, str):
                    if number:
                        progress.note(f"{reasons[0]}. The folder shows {describe_place(location)}")
                    print_text(f"python {found(verdict, folder)}")
                    return
                reasons.append(f"{describe_place(location)}: {found}")
        reason = next(iter(reasons), why or "it names no place")
        raise UsageError(f"{run} cannot be reproduced: {reason}")


def _reproduce_programs(
    check: "_Check",
    wanted: "Wanted",
    with_text: bool,  # noqa: FBT001 - the option
    words: "Words",
    progress: "Progress",
) -> "Write | str":
    """Return a function that writes the operations behind a wrong value, or the reason why none can be written."""
    from assay.judge.limits import load_limits
    from assay.reproduce.folder import build, find_tokens, write
    from assay.reproduce.script import STATISTICS

    record: Any = check.record
    pairs = record(wanted, progress)
    if not pairs:  # values that must be equal have no token, and their place no step
        (folder := wanted.folder / "any-step").mkdir()
        pairs = record(wanted._replace(folder=folder, step=None), progress)
    limits = load_limits(check.limits)
    by_name = {name: limits.of(statistic) for name, statistic in STATISTICS.items()}
    with progress.step("making it smaller"):
        found = build(pairs, check.dtype, by_name, words)
    if isinstance(found, str):
        return found
    is_private = not with_text and _holds_own_prompts(check.golden)
    if is_private and (tokens := find_tokens(found)):
        return f"{', '.join(tokens)} would hold tokens of your prompts: add --with-text"
    return partial(write, found)


def _reproduce_state(
    check: "_Check", location: "Location", folder: Path, words: "Words", progress: "Progress"
) -> "Write | str":
    """Return a function that writes a wrong weight, moment or setting, or the reason why it finds none."""
    from assay.reproduce.wrong_values import choose, write

    found = choose(check.find(location.phase, folder, progress), location.parameter)
    if found is not None:
        return partial(write, found, words)
    return "no value of a single step is over its limit, and no weight, moment or setting is wrong"


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


class _Check(NamedTuple):
    """The parts of a check that a reproducer needs."""

    device: str
    """The argument for `torch.device`."""
    dtype: str
    limits: str
    golden: Path
    record: "Record | None"
    """Records the programs of values; None of a check without operations."""
    find: "Find"
    """Finds wrong values of the state."""


def _read_check(context: typer.Context, verdict: "Verdict", run: Path) -> _Check:
    from assay.api import checks
    from assay.devices.registry import open_run

    kind = " ".join(verdict.command[1:3])
    if kind not in ("check generate", "check train", "check load"):
        raise UsageError(_name_other_command(verdict, run))
    command: Any = context.find_root().command
    for name in kind.split():
        command = command.get_command(context, name)
    given = command.make_context(command.name, list(verdict.command[3:])).params
    del given["as_json"]
    if kind == "check load":
        from assay.load import find_wrong_values

        request = checks.load_request_of(read_values(checks.check_load, given))
        return _Check("cpu", "", "", run, None, partial(find_wrong_values, request))
    check: Any
    if kind == "check generate":
        from assay.generate import record_programs as programs

        check = checks.generate_check_of(read_values(checks.check_generate, given))
        here, recorded = run / HERE_FOLDER / GOLDEN_FOLDER, check.golden
        recorded = here if here.is_dir() else recorded
    else:
        from assay.training import program_pairs as programs  # type: ignore[no-redef]

        check = checks.train_check_of(read_values(checks.check_train, given))
        recorded = check.recorded
    check = replace(check, golden=recorded or run / GOLDEN_FOLDER)
    if not check.golden.is_dir():
        raise UsageError(f"{check.golden} was not kept: run the check again with --keep replay")
    side = parse_run(str(check.candidate))
    record, find = partial(programs.record_pairs, check), partial(programs.find_wrong_state, check)
    device = open_run(side).torch_device
    return _Check(device, side.dtype, check.limits, check.golden, record, find)


_NOT_REPRODUCED = {
    "compare": "compares dumps without the program that made them",
    "smoke": "records losses and hashes, and no inputs of a module",
}


def _name_other_command(verdict: "Verdict", run: Path) -> str:
    """Name the check to run where a run of another command cannot be reproduced itself."""
    command = " ".join(verdict.command[1:2])
    job = "train" if command == "smoke" else "generate"
    model, sides = verdict.model.get("name") or "MODEL", "--reference cpu/float32 --candidate RUN"
    return (
        f"{run} is of `assay {command}`, which {_NOT_REPRODUCED.get(command, 'computes no values')}: run"
        f" `assay check {job} {model} {sides}`, and reproduce its FAIL"
    )


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
        and row.statistic not in _OF_FREE_RUNS
        and row.limit is not None
        and not row.ratio <= row.limit
    ]
    failed.sort(key=over_limit, reverse=True)
    ports = dict.fromkeys((row.phase, *_split(row)) for row in failed)
    return tuple(ports)[:_MOST_PORTS]


def _split(row: "Measurement") -> tuple[str, str]:
    """Return module and name of a port; one of the stage's own module is written without the module."""
    from assay.hooks.caches import CHANGED, KEPT

    # Of what a call adds to a cache, the tokens before it are what must be equal.
    port = row.port.replace(CHANGED, KEPT) if row.statistic == "exact" else row.port
    at, found, name = port.rpartition(":")
    return (at.replace("(model)", ""), name) if found else (row.module, port)
