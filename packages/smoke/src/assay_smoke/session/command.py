"""Runs a session for `assay smoke run`."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from assay.devices.detection.isolation import require_run
from assay.devices.registry import open_device
from assay.devices.run_string import parse_run
from assay.errors import UsageError
from assay.files import DiskError, read_record, write_whole
from assay.runs import RunFolder, open_progress
from assay.training.trainers.registry import require_trainer
from assay.verdicts import SCHEMA
from assay_smoke.cases.running import prepare
from assay_smoke.cases.settings import TRAINERS, is_deepspeed
from assay_smoke.external.launch import require_runnable
from assay_smoke.external.library import read_library
from assay_smoke.matrix.cases import Case, case_of
from assay_smoke.matrix.coverage import Coverage, covered_pairs
from assay_smoke.matrix.durations import RecordedRun, history_file, machine_kind, record_runs
from assay_smoke.matrix.expressions import compile_expression
from assay_smoke.matrix.ordering import parse_budget
from assay_smoke.matrix.planning import PlanOptions, SmokePlan, plan_smoke
from assay_smoke.matrix.rules import HOST, check_compatible, rules_for
from assay_smoke.session.items import COMMAND, SessionItem, case_item, external_item
from assay_smoke.session.results import CaseResult, SessionReport, write_page
from assay_smoke.session.side_by_side import Devices, run_items
from assay_smoke.trainers.deepspeed.process import require_deepspeed

_HOST_CARDS = 4

REPORT_FILE = "session.json"


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Options of `assay smoke run`."""

    names: tuple[str, ...] = ()
    plan: Path | None = None
    extra: tuple[str, ...] = ()
    """Libraries, as command:FILE.toml, that run in addition to the plan."""
    device: str = "cpu"
    precision: str | None = None
    coverage: Coverage = "pairwise"
    cards: int | None = None
    budget: str | None = None
    keyword: str | None = None
    trainer: str | None = None
    timeout: float = 300.0


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The items of a session."""

    items: list[SessionItem]
    cases: list[Case]
    num_pairs: int
    """Number of possible pairs of values in the plan; 0 without a plan."""


def run_session(
    options: SessionOptions,
    output: Path | None,
    tell: Callable[[CaseResult, int, int], None],
) -> tuple[SessionReport, Path]:
    """Run the session that `options` request. Report and page are written even if it is interrupted.

    output: folder for them; None for a new one. tell: called with each result, its number and the
        number of items.

    Raises: UsageError or MachineError before any run if an item cannot run.
    """
    require_trainer(options.trainer)
    require_run(parse_run(f"{options.device}/{options.precision or 'float32'}"))
    folder = RunFolder.create("smoke run", output).path
    chosen = _choose(options, folder / "references")
    results: list[CaseResult] = []
    begun = time.monotonic()
    try:
        with open_progress() as progress:
            with progress.step("compiles extensions of trainers"):
                for case in chosen.cases:
                    prepare(case, options.trainer, folder, progress)
            for result in run_items(chosen.items, _devices(options.device), folder, progress):
                results.append(result)
                tell(result, len(results), len(chosen.items))
    finally:
        ran = {result.name for result in results}
        report = SessionReport(
            schema=SCHEMA,
            device=options.device,
            cases=results,
            seconds=time.monotonic() - begun,
            pairs_covered=len(covered_pairs(case for case in chosen.cases if case.id in ran)),
            pairs_possible=chosen.num_pairs,
        )
        write_whole(folder / REPORT_FILE, report.model_dump_json(by_alias=True, indent=1))
        page = write_page(report, folder)
        if options.trainer is None:
            _record(options, chosen.cases, report)
    return report, page


def _choose(options: SessionOptions, references: Path) -> _Chosen:
    commands = [name for name in options.names if name.startswith(COMMAND)]
    cases = [case_of(name) for name in options.names if not name.startswith(COMMAND)]
    num_pairs = 0
    if not options.names:
        plan = (
            read_record(SmokePlan, options.plan)
            if options.plan
            else plan_smoke(_plan_options(options))
        )
        cases = [planned.case for planned in plan.cases]
        num_pairs = plan.pairs.possible
    rules = rules_for(open_device(options.device).vendor.name)
    for case in cases:
        if reason := check_compatible(case, rules):
            raise UsageError(f"{case.id} cannot be run: {reason}")
        if options.cards is not None and case.cards > options.cards:
            raise UsageError(f"{case.id} needs {case.cards} cards, and --cards is {options.cards}")
    cases = [case for case in cases if _matches(options.keyword, case.id)]
    if options.precision is not None:
        cases = [case for case in cases if case.precision == options.precision]
    if options.trainer is None:
        _require_libraries(cases)
    items = [
        case_item(case, options.device, references, options.trainer, options.timeout)
        for case in cases
    ]
    for toml in [_toml_of(name) for name in (*commands, *options.extra)]:
        read_library(toml)  # a misspelled name is an error even if -k does not match it
        external = external_item(toml)
        if _matches(options.keyword, external.name):
            require_runnable(toml)
            items.append(external)
    if not items:
        raise UsageError(f"nothing to run: {_left_by(options)}")
    _require_different([item.name for item in items])
    return _Chosen(items, cases, num_pairs)


def _left_by(options: SessionOptions) -> str:
    """Name the options that left nothing to run."""
    given = {
        "-k": options.keyword and repr(options.keyword),
        "--run": options.precision and f"{options.device}/{options.precision}",
        "--budget": options.budget,
        "--plan": options.plan and str(options.plan),
    }
    words = " and ".join(f"{name} {value}" for name, value in given.items() if value)
    asked = ", ".join(options.names) or "the plan"
    return f"{words or 'these options'}: no case of {asked} matches"


def _require_different(names: list[str]) -> None:
    """Raise UsageError for two items of one name, since they would share a folder."""
    for name, number in Counter(names).items():
        if number > 1:
            raise UsageError(f"{name} is given {number} times: each name runs once")


def _require_libraries(cases: list[Case]) -> None:
    """Raise UsageError if a case needs a library that is not installed."""
    waiting = [case.id for case in cases if is_deepspeed(TRAINERS[case.framework])]
    if not waiting:
        return
    try:
        require_deepspeed()
    except UsageError as error:
        others = f" and {len(waiting) - 1} more" if len(waiting) > 1 else ""
        raise UsageError(
            f"{waiting[0]}{others} cannot be run: {error}, or leave them out: -k 'not zero'"
        ) from error


def _toml_of(name: str) -> Path:
    """Return the file that describes a training library. Raises: UsageError for any other name."""
    if not name.startswith(COMMAND):
        raise UsageError(f"--with {name}: give {COMMAND}FILE.toml")
    return Path(name.removeprefix(COMMAND)).expanduser()


def _devices(name: str) -> Devices | None:
    """Return the devices if cases can run side by side. A name such as cuda:1 is a single device."""
    device = open_device(name)
    if ":" in name or not device.vendor.visible_devices or device.count() < 2:
        return None
    return Devices(device.count(), device.vendor.visible_devices)


def _matches(expression: str | None, name: str) -> bool:
    return expression is None or compile_expression(expression)(name)


def _plan_options(options: SessionOptions) -> PlanOptions:
    device = open_device(options.device)
    on_host = device.vendor.name == HOST
    return PlanOptions(
        vendor=device.vendor.name,
        cards=options.cards or (_HOST_CARDS if on_host else device.count()),
        coverage=options.coverage,
        budget_seconds=None if options.budget is None else parse_budget(options.budget),
        # The keyword may select only an extra library: then matching no case is not an error.
        expression=None if options.extra else options.keyword,
    )


def _record(options: SessionOptions, cases: Sequence[Case], report: SessionReport) -> None:
    """Record the durations for later plans. A full disk is ignored."""
    by_id = {case.id: case for case in cases}
    now = datetime.now(UTC)
    runs = [
        (by_id[one.name], RecordedRun(seconds=one.seconds, outcome=one.outcome, time=now))
        for one in report.cases
        if one.name in by_id
    ]
    vendor = open_device(options.device).vendor.name
    with suppress(DiskError):
        record_runs(history_file(), machine_kind(vendor), runs)
