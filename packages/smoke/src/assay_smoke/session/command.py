"""Runs a session for `assay smoke run`: its items in turn, or side by side in processes with their own devices.

An item is a case of the matrix, or a training library with a command line. It runs once more after a failure
of the machine. Results are written as JSON and as a page.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field

from assay.devices.base import Device
from assay.devices.detection import require_run
from assay.devices.registry import open_device
from assay.devices.run_string import parse_run
from assay.errors import AssayError, UsageError, assay_command, name_some
from assay.files import write_whole
from assay.judge.levels import failed
from assay.launch import RemoteFunction, TimeLimits, call, interrupt_all
from assay.output.pages import page_environment
from assay.progress import format_duration
from assay.report.page.html import publish_one
from assay.report.run_report import read_report
from assay.runs import Progress, RunFolder, open_progress
from assay.training.trainers.registry import require_trainer
from assay.verdicts import SCHEMA, Outcome, Record, Verdict, overall_outcome
from assay_smoke.cases.running import TRAINERS, CaseRun, is_deepspeed, prepare
from assay_smoke.external.levels import run_external
from assay_smoke.external.library import COMMAND, find_files
from assay_smoke.external.watched_run import require_runnable
from assay_smoke.judging import write_verdict
from assay_smoke.machine import failed_part
from assay_smoke.matrix import rules
from assay_smoke.timelines import CyclePhase, PhaseSeconds, peak_memory, phases_of
from assay_smoke.trainers.deepspeed.trainer import require_deepspeed

PAGE_FILE = "index.html"

_TEMPLATES = Path(__file__).with_name("templates")


# ERROR: nothing to judge, for a missing dependency or a library that contradicts its file.
CaseOutcome = Outcome | Literal["ERROR"]


class CaseResult(Record):
    """The result of a case or library."""

    name: str
    outcome: CaseOutcome
    seconds: float
    reason: str | None = None
    """Texts of the levels that failed or were not compared. For a PASS, text of an unchecked level. For an
    ERROR, its message."""
    diagnosis: str | None = None
    infrastructure: str | None = None
    """Failure of the machine in the last try, unrelated to the case."""
    tries: int = 1
    tried_again_for: str | None = None
    """Failure of the machine in the try before."""
    command: str = ""
    """Command that runs the item alone."""
    folder: str = ""
    """Folder of its verdict, report and logs, relative to that of the session."""
    phases: list[PhaseSeconds] = Field(default_factory=list)
    host_bytes: int = 0
    """Peak memory of any rank."""
    device_bytes: int = 0


class SessionReport(Record):
    """Results of a session in the order in which the items ended."""

    schema_: int = Field(default=SCHEMA, alias="schema")
    device: str
    cases: list[CaseResult]
    not_run: list[str] = Field(default_factory=list)
    """Names of the items that the budget or an interrupt left out."""
    seconds: float
    pairs_covered: int
    pairs_possible: int

    @property
    def exit_code(self) -> int:
        """Return 2 for an error or a failure of the machine, otherwise 1, 3 or 0 by the outcomes."""
        if any(case.outcome == "ERROR" or case.infrastructure for case in self.cases):
            return 2
        return overall_outcome(Outcome(case.outcome) for case in self.cases).exit_code


def reason_of(verdict: Verdict) -> str | None:
    """Return the reasons of failed levels and the next steps, else those of uncompared levels, or of an unchecked one."""
    facts = {name: level.model_extra or {} for name, level in verdict.levels.items()}
    for outcome in (Outcome.FAIL, Outcome.NOT_COMPARED):
        reasons = [
            f"{name}: {level.reason or facts[name].get('worst') or 'over its limit'}"
            for name, level in verdict.levels.items()
            if level.verdict is outcome
        ]
        if reasons:
            return "\n".join([*reasons, *(f"next: {step}" for step in verdict.next_steps)])
    unchecked = (name for name, extra in facts.items() if extra.get("unchecked"))
    return next((f"{name}: {verdict.levels[name].reason}" for name in unchecked), None)


def write_page(report: SessionReport, folder: Path) -> Path:
    """Write the page of `report` into the session's folder."""
    environment = page_environment(_TEMPLATES)
    environment.filters["duration"] = format_duration
    page = environment.get_template("session.html.j2").render(
        report=report,
        outcomes=describe_outcomes(report),
        extent=describe_extent(report),
        phases=get_args(CyclePhase),
        longest=max((phase.end for case in report.cases for phase in case.phases), default=0.0)
        or 1.0,  # for a run that ended at once
    )
    return write_whole(folder / PAGE_FILE, page)


def describe_outcomes(report: SessionReport) -> str:
    """Count the outcomes, as in "1 FAIL, 7 PASS (2 left something unchecked) on cpu"."""
    counts = sorted(Counter(case.outcome for case in report.cases).items())
    unchecked = sum(case.outcome is Outcome.PASS and bool(case.reason) for case in report.cases)
    left = f" ({unchecked} left something unchecked)" if unchecked else ""
    words = ", ".join(f"{count} {outcome}" for outcome, count in counts)
    return f"{words}{left} on {report.device}"


def describe_extent(report: SessionReport) -> str:
    """Describe the size, as in "8 cases in 2 min 5 s, 362 of 575 pairs of values that can meet"."""
    number = len(report.cases)
    extent = f"{number} case{'' if number == 1 else 's'} in {format_duration(report.seconds)}"
    if report.pairs_possible:  # 0 for cases that the user named
        pairs = f"{report.pairs_covered} of {report.pairs_possible}"
        extent = f"{extent}, {pairs} pairs of values that can meet"
    return f"{extent}; not run: {name_some(report.not_run)}" if report.not_run else extent


_COLLECTIVE_SECONDS = 60.0
_WORLD_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class SessionItem:
    """A case or library that a session runs and judges."""

    name: str
    """Name in reports and of its folder."""
    command: str
    """Command that runs it alone."""
    run: Callable[[Path, Progress], Verdict]
    """Runs it and writes its verdict and logs into a folder. Sent to other processes."""
    num_cards: int | None = None
    """Number of devices that it uses; None for all."""
    is_planned: bool = True
    """False for a library, which may contradict its file. A planned case has to be possible."""


def case_item(
    case: rules.Case, device: str, references: Path, trainer: str | None, timeout: float
) -> SessionItem:
    """Make the item of a case; see `CaseRun`. timeout: of a world, in seconds."""
    collective = min(_COLLECTIVE_SECONDS, timeout / 2)
    limits = TimeLimits(timeout, collective_seconds=collective, body_seconds=timeout)
    run = CaseRun(case, device, references, trainer, limits=limits).run
    command = assay_command("smoke", "run", case.id, device=device, trainer=trainer)
    return SessionItem(case.id, command, run, case.cards)


def external_item(toml: Path, device: str | None = None) -> SessionItem:
    """Make the item of a library. examples/trl_sft/smoke-lora.toml gets the name `trl_sft-lora`.

    device: to train on, if not the file's.
    """
    folder, stem = toml.resolve().parent.name, toml.stem
    name = folder if stem == "smoke" else f"{folder}-{stem.removeprefix('smoke-')}"
    command = assay_command("smoke", "run", f"{COMMAND}{toml}", device=device)
    run = partial(run_external, toml.resolve(), device_name=device)
    return SessionItem(name, command, run, is_planned=False)


# An item, and the folder of the session.
ItemRequest = tuple[SessionItem, Path]


def run_with_retry(request: ItemRequest, progress: Progress) -> CaseResult:
    """Run an item in a subfolder of the session."""
    item, session = request
    first = _run_once(item, session, item.name, progress)
    if first.infrastructure is None:
        return first
    second = _run_once(item, session, f"{item.name}.2", progress)
    return second.model_copy(update={"tries": 2, "tried_again_for": first.infrastructure})


def _run_once(item: SessionItem, session: Path, name: str, progress: Progress) -> CaseResult:
    folder = session / "cases" / name
    folder.mkdir(parents=True)
    begun = time.monotonic()
    outcome, reason, diagnosis = _judge(item, folder, progress)
    host, device = peak_memory(folder)
    return CaseResult(
        name=item.name,
        outcome=outcome,
        seconds=time.monotonic() - begun,
        reason=reason,
        diagnosis=diagnosis,
        infrastructure=None if outcome is Outcome.PASS else failed_part(reason),
        command=item.command,
        folder=str(folder.relative_to(session)),
        phases=phases_of(folder),
        host_bytes=host,
        device_bytes=device,
    )


def _judge(
    item: SessionItem, folder: Path, progress: Progress
) -> tuple[CaseOutcome, str | None, str | None]:
    """Run an item and write its page. Returns: outcome, reason and diagnosis. An ERROR has no verdict."""
    try:
        verdict = item.run(folder, progress)
    except AssayError as error:
        if not item.is_planned:
            return "ERROR", str(error), None
        found = {"run": failed(0, f"could not run: {error}")}
        verdict = write_verdict(found, folder, candidate={"case": item.name})
    publish_one(read_report(folder))
    return verdict.verdict, reason_of(verdict), verdict.diagnosis


_RUN_ITEM: RemoteFunction[ItemRequest, CaseResult] = RemoteFunction(f"{__name__}:run_with_retry")


def run_items(
    items: Sequence[SessionItem],
    device: Device | None,
    folder: Path,
    progress: Progress,
    budget_seconds: float = inf,
) -> Iterator[CaseResult]:
    """Yield the result of each item when it ends. No item starts after the budget, except the first ones.

    device: of which there are several; None runs the items in turn.
    """
    deadline = time.monotonic() + budget_seconds
    if device is not None and len(items) > 1:
        yield from _run_side_by_side(items, device, folder, progress, deadline)
        return
    for item in items:
        yield run_with_retry((item, folder), progress)
        if time.monotonic() > deadline:
            return


def _run_side_by_side(
    items: Sequence[SessionItem],
    device: Device,
    folder: Path,
    progress: Progress,
    deadline: float,
) -> Iterator[CaseResult]:
    """Start each item as soon as enough devices are free, the largest first."""
    # The ranks of an item that needs more devices than there are share all.
    num_devices = device.count()
    needed = {item.name: min(item.num_cards or num_devices, num_devices) for item in items}
    waiting = sorted(items, key=lambda item: needed[item.name], reverse=True)
    free = list(range(num_devices))
    running: dict[Future[CaseResult], list[int]] = {}
    with ThreadPoolExecutor(num_devices) as pool:
        try:
            while True:
                for item in [*waiting]:
                    if needed[item.name] > len(free):
                        continue
                    waiting.remove(item)
                    own, free = free[: needed[item.name]], free[needed[item.name] :]
                    visible = {str(device.vendor.visible_devices): ",".join(map(str, own))}
                    running[pool.submit(_run_beside, item, visible, folder, progress)] = own
                if not running:
                    return
                for task in wait(running, return_when=FIRST_COMPLETED).done:
                    free = sorted([*free, *running.pop(task)])
                    yield task.result()
                if time.monotonic() > deadline:
                    waiting.clear()
        except BaseException:
            interrupt_all()
            raise


def _run_beside(
    item: SessionItem, visible: dict[str, str], folder: Path, progress: Progress
) -> CaseResult:
    logs, begun = folder / "logs", time.monotonic()
    logs.mkdir(exist_ok=True)
    try:
        return call(
            _RUN_ITEM,
            (item, folder),
            folder=logs,
            name=item.name,
            progress=progress,
            environment=visible,
        )[0]
    except AssayError as error:  # the process was killed, for example for lack of memory
        return CaseResult(
            name=item.name,
            outcome=Outcome.FAIL,
            seconds=time.monotonic() - begun,
            reason=f"run: {error}",
            infrastructure=failed_part(str(error)),
            command=item.command,
            folder=f"cases/{item.name}",
        )


_HOST_CARDS = 4

REPORT_FILE = "session.json"


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Options of `assay smoke run`."""

    names: tuple[str, ...] = ()
    own_device: str | None = None
    """None: the host for cases, and that of its file for a library."""
    precision: str | None = None
    coverage: rules.Coverage = "pairwise"
    cards: int | None = None
    budget_seconds: float = inf
    """Time after which no item starts."""
    keyword: str | None = None
    trainer: str | None = None
    timeout: float | None = None

    @property
    def device(self) -> str:
        """Return the device of cases."""
        return self.own_device or rules.HOST


def run_session(
    options: SessionOptions, output: Path | None, tell: Callable[[CaseResult, int, int, Path], None]
) -> tuple[SessionReport, Path]:
    """Run the session that `options` request. Report and page are written even if it is interrupted.

    output: folder for them; None for a new one. tell: called with each result, its number, the number
        of items and its folder.

    Raises: UsageError or MachineError before any run if an item cannot run.
    """
    require_trainer(options.trainer)
    require_run(parse_run(f"{options.device}/{options.precision or 'float32'}"))
    folder = RunFolder.create("smoke run", output).path
    items, cases, num_pairs = _choose(options, folder / "references")
    results: list[CaseResult] = []
    begun = time.monotonic()
    try:
        with open_progress() as progress:
            with progress.step("compiling extensions of trainers"):
                for case in cases:
                    prepare(case, options.trainer, folder, progress)
            shared = _shared_device(options.device)
            for result in run_items(items, shared, folder, progress, options.budget_seconds):
                results.append(result)
                tell(result, len(results), len(items), folder / result.folder)
    finally:
        ran = {result.name for result in results}
        report = SessionReport(
            schema=SCHEMA,
            device=options.device,
            cases=results,
            not_run=[item.name for item in items if item.name not in ran],
            seconds=time.monotonic() - begun,
            pairs_covered=len(rules.covered_pairs(case for case in cases if case.id in ran)),
            pairs_possible=num_pairs,
        )
        write_whole(folder / REPORT_FILE, report.model_dump_json(by_alias=True, indent=1))
        page = write_page(report, folder)
    return report, page


def _choose(
    options: SessionOptions, references: Path
) -> tuple[list[SessionItem], list[rules.Case], int]:
    """Return the items, their cases, and the number of possible pairs of values; 0 without a plan."""
    tomls = find_files(options.names)
    cases = [rules.case_of(name) for name in options.names if not name.startswith(COMMAND)]
    for option, given in {
        "--trainer": options.trainer,
        "the dtype of --run": options.precision,
        "--cards": options.cards,
        "--timeout": options.timeout,
    }.items():
        if given and tomls:
            own = f"{COMMAND}{tomls[0]}, whose file has its own keys"
            raise UsageError(f"{option} is for cases, not for {own}")
    num_pairs, device = 0, open_device(options.device)
    vendor = device.vendor.name
    if not options.names:
        cards = options.cards or (_HOST_CARDS if vendor == rules.HOST else device.count())
        plan = rules.plan_smoke(vendor, cards, options.coverage, options.keyword)
        cases, num_pairs = [planned.case for planned in plan.cases], plan.pairs.possible
    refusing = rules.rules_for(vendor)
    for case in cases:
        if reason := rules.check_compatible(case, refusing):
            raise UsageError(f"{case.id} cannot be run: {reason}")
        if options.cards is not None and case.cards > options.cards:
            raise UsageError(f"{case.id} needs {case.cards} cards, and --cards is {options.cards}")
    matches = rules.compile_expression(options.keyword)
    cases = [
        case for case in cases if matches(case.id) and options.precision in (None, case.precision)
    ]
    if options.trainer is None:
        _require_libraries(cases)
    items = [
        case_item(
            case, options.device, references, options.trainer, options.timeout or _WORLD_SECONDS
        )
        for case in cases
    ]
    for toml in tomls:
        external = external_item(toml, options.own_device)
        if matches(external.name):
            require_runnable(toml, options.own_device)
            items.append(external)
    _require_items(options, [item.name for item in items])
    return items, cases, num_pairs


def _require_items(options: SessionOptions, names: list[str]) -> None:
    """Raise UsageError without an item, or for two of one name, since they would share a folder."""
    if not names:
        given = {
            "-k": options.keyword and repr(options.keyword),
            "--run": options.precision and f"{options.device}/{options.precision}",
        }
        words = " and ".join(f"{name} {value}" for name, value in given.items() if value)
        asked = f"no case of {', '.join(options.names) or 'the plan'} matches"
        raise UsageError(f"nothing to run: {words or 'these options'}: {asked}")
    for name, number in Counter(names).items():
        if number > 1:
            raise UsageError(f"{name} is given {number} times: each name runs once")


def _require_libraries(cases: list[rules.Case]) -> None:
    """Raise UsageError if a case needs a library that is not installed."""
    waiting = [case.id for case in cases if is_deepspeed(TRAINERS[case.framework])]
    try:
        if waiting:
            require_deepspeed()
    except UsageError as error:
        refused = f"{name_some(waiting, 1)} cannot be run: {error}"
        raise UsageError(f"{refused}, or leave them out: -k 'not zero'") from error


def _shared_device(name: str) -> Device | None:
    """Return the device if cases can run side by side on several. A name such as cuda:1 is a single one."""
    device = open_device(name)
    has_several = ":" not in name and device.vendor.visible_devices and device.count() > 1
    return device if has_several else None
