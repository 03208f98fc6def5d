"""`assay reproduce`: a failure as a folder that fails by itself."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Annotated, Any

import typer

from assay.api.options import Option
from assay.cli.derived_commands import read_values, with_options
from assay.devices.run_string import parse_run
from assay.errors import UsageError
from assay.launch import RemoteFunction, call, world_of
from assay.output.streams import print_text
from assay.runs.results import GOLDEN_FOLDER, HERE_FOLDER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assay.reproduce.script import Reproduction
    from assay.reproduce.wrong_values import WrongValue
    from assay.runs import Progress
    from assay.sites import Phase
    from assay.verdicts import Location, Measurement, Verdict

# How many places are tried.
_MOST_PLACES = 4
# Of a step's values: each is a program, and the smallest that fails is kept.
_MOST_PORTS = 8
# Statistics of steps without recorded values, whose errors no single module makes.
_OF_FREE_RUNS = ("trajectory-error", "loss-error")

# Modules with the functions that record operations, and that find wrong values of the state.
_MODULES = {
    "check generate": "assay.generate.reproduction",
    "check train": "assay.training.processes.reproduction",
    "check load": "assay.load",
}


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

    Example: assay reproduce runs/20261102-101500-check-generate

    `python DIR/reproduce.py` runs the operations that made the wrong value, and exits with 1. To record them,
    the candidate runs once more.

    Exit code: 0, or 2 if nothing in the run fails by itself.
    """
    from assay.judge.wording import describe_location, describe_place
    from assay.runs import RunFolder, open_progress, removed_if_refused
    from assay.verdicts import Outcome

    verdict, rows = _read_failure(run)
    (kind, check), places = _read_check(context, verdict, run), _places(verdict, place)
    why = next((one.reason for one in verdict.levels.values() if one.verdict is Outcome.FAIL), None)
    # Inputs of no module are those that a loader hands out: no value shows their error.
    of_loader = any(one.phase == "inputs" and one.module is None for one in places[:1])
    if of_loader and why:
        why += ", and no operation of torch hands out the inputs"
        raise UsageError(f"{run} cannot be reproduced: {why}")
    folder = RunFolder.create("reproduce", output or run / "reproduce").path
    reasons: list[str] = []
    with removed_if_refused(), open_progress() as progress, TemporaryDirectory() as scratch:
        if kind == "check train":  # with the options that the user's trainer has
            from assay.training.check import with_user_code

            check = with_user_code(check, Path(scratch), progress)
        failed = _Failed(kind, check, rows, with_text, Path(scratch), progress)
        for number, location in enumerate(places):
            of_state = location.phase == "checkpoint" or verdict.diagnosis == "weight-mismatch"
            attempts: list[Any] = [failed.find_operations]
            if of_state:
                attempts.insert(0, failed.find_state)
            elif not number:
                attempts.append(failed.find_state)
            for attempt in attempts:
                found = attempt(location)
                if not isinstance(found, str):
                    if number:
                        progress.note(f"{reasons[0]}. The folder shows {describe_place(location)}")
                    script = found.write(describe_location(location), verdict, folder)
                    print_text(f"python {script}")
                    return
                if found:
                    reasons.append(f"{describe_place(location)}: {found}")
        reason = next(iter(reasons), why or "it names no place")
        raise UsageError(f"{run} cannot be reproduced: {reason}")


def _read_failure(run: Path) -> "tuple[Verdict, Sequence[Measurement]]":
    from assay.runs.results import read_measurements, read_verdict
    from assay.verdicts import Outcome

    verdict, (rows, complaints) = read_verdict(run), read_measurements(run)
    if verdict.verdict is not Outcome.FAIL:
        raise UsageError(f"{run} is {verdict.verdict}: only a FAIL can be reproduced")
    if complaints:
        raise UsageError(f"{run}: {complaints[0]}")
    return verdict, rows


@dataclass(frozen=True)
class _Failed:
    """A failed check, whose sides run once more."""

    kind: str
    check: Any
    """Of generation or training, with its golden; the request of a load."""
    rows: "Sequence[Measurement]"
    with_text: bool
    scratch: Path
    progress: "Progress"

    def _begin(self) -> tuple[Any, dict[str, Any]]:
        """Return the check with a new folder, and the world and the Python of its candidate."""
        if self.kind == "check load":
            return self.check, {}
        check = replace(self.check, folder=Path(mkdtemp(dir=self.scratch)))
        device = parse_run(str(check.candidate)).device
        return check, {"world": world_of(check.mesh, device), "python": check.python}

    def find_operations(self, location: "Location") -> "Reproduction | str":
        """Return the operations behind a wrong value, or the reason why none fail by themselves; "" without a value."""
        from assay.devices.registry import open_run
        from assay.generate.golden import read_golden
        from assay.judge.limits import load_limits
        from assay.replay.value_programs import Wanted, pair_programs
        from assay.reproduce.folder import build, find_tokens
        from assay.reproduce.script import STATISTICS

        module, ports = _MODULES[self.kind], _failed_ports(self.rows, location)
        if self.kind == "check load" or not ports:
            return ""
        function: Any = RemoteFunction(f"{module}:record_programs", [module])
        pairs: list[Any] = []
        # Values that must be equal have no token, and their place no step.
        for step in (location.step, None):
            check, candidate = self._begin()
            pairs = pair_programs(function, check, Wanted(step, ports), self.progress, **candidate)
            if pairs:
                break
        run, limits = parse_run(str(self.check.candidate)), load_limits(self.check.limits)
        by_name = {name: limits.of(statistic) for name, statistic in STATISTICS.items()}
        with self.progress.step("making it smaller"):
            found = build(pairs, run.dtype, by_name, open_run(run).torch_device)
        # The texts of training are assay's own.
        own = self.kind == "check train" or read_golden(self.check.golden).inputs.prompts is None
        tokens = [] if own or self.with_text or isinstance(found, str) else find_tokens(found)
        hint = "would hold tokens of your prompts: add --with-text"
        return f"{', '.join(tokens)} {hint}" if tokens else found

    def find_state(self, location: "Location") -> "WrongValue | str":
        """Return the wrong weight, moment or setting, or a sentence that says that none was found."""
        from assay.reproduce.wrong_values import choose

        module = _MODULES[self.kind]
        find: Any = RemoteFunction(f"{module}:find_wrong_values", [module])
        check, candidate = self._begin()
        folder = Path(mkdtemp(dir=self.scratch))
        ask = partial(call, find, check, folder=folder, name="candidate", progress=self.progress)
        found = [one for of_rank in ask(**candidate) for one in of_rank]
        nothing = "no value of a single step is over its limit, and no weight or moment is wrong"
        return choose(found, location.parameter) or nothing


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


def _read_check(context: typer.Context, verdict: "Verdict", run: Path) -> tuple[str, Any]:
    """Return the kind of check, and the check with its golden, or the request of a load."""
    from assay.api import checks

    kind = " ".join(verdict.command[1:3])
    if kind not in _MODULES:
        job = "train" if verdict.command[1:2] == ["smoke"] else "generate"
        raise UsageError(
            f"{run} is of `assay {' '.join(verdict.command[1:2])}`, which records no inputs of a module: run `assay"
            f" check {job} {verdict.model.get('name') or 'MODEL'} --reference cpu/float32 --candidate RUN`, and"
            " reproduce its FAIL"
        )
    command: Any = context.find_root().command
    for name in kind.split():
        command = command.get_command(context, name)
    given = command.make_context(command.name, list(verdict.command[3:])).params
    del given["as_json"]
    readers: dict[str, tuple[Any, Any]] = {
        "check generate": (checks.check_generate, checks.generate_check_of),
        "check train": (checks.check_train, checks.train_check_of),
        "check load": (checks.check_load, checks.load_request_of),
    }
    function, read = readers[kind]
    check = read(read_values(function, given))
    if kind == "check load":
        return kind, check
    here = run / HERE_FOLDER / GOLDEN_FOLDER
    recorded = check.golden if kind == "check generate" else check.recorded
    check = replace(check, golden=here if here.is_dir() else recorded or run / GOLDEN_FOLDER)
    if not check.golden.is_dir():
        raise UsageError(f"{check.golden} was not kept: run the check again with --keep replay")
    return kind, check


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
