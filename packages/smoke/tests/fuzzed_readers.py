"""Readers of this package for the fuzz: plans, durations, library files, losses, timelines."""

import json
from datetime import UTC, datetime
from pathlib import Path

from assay.devices.registry import open_device
from assay.verdicts import Outcome
from assay_smoke.cases.timeline import Timeline, read_timeline, where_it_stopped
from assay_smoke.external.library import Losses, read_library
from assay_smoke.external.watched_run import LossReader
from assay_smoke.matrix.planning import (
    Durations,
    PlanOptions,
    RecordedRun,
    plan_smoke,
    read_history,
    record_runs,
)
from assay_smoke.matrix.rules import case_of
from assay_smoke.session.command import SessionOptions
from assay_smoke.session.command import _choose as choose_items
from packages.core.tests.fuzz.reader import NotedError, Reader
from packages.smoke.tests.unit.external.test_library import WHOLE

_CASE = case_of("ddp-2")


def _write_plan(folder: Path) -> None:
    plan = plan_smoke(PlanOptions(vendor="cpu", cards=2, coverage="one", history=folder / "none"))
    (folder / "plan.json").write_text(plan.model_dump_json(by_alias=True))


def _choose_items(folder: Path) -> object:
    options = SessionOptions((), plan=folder / "plan.json")
    return choose_items(options, folder / "references")


def _write_durations(folder: Path) -> None:
    run = RecordedRun(seconds=3.0, outcome=Outcome.PASS, time=datetime(2030, 1, 2, tzinfo=UTC))
    record_runs(folder / "history.json", "cpu-test-2", [(_CASE, run)])


def _expect_seconds(folder: Path) -> object:
    history = read_history(folder / "history.json")
    durations = Durations.of(history, "cpu-test-2")
    seconds = (durations.expected_seconds(_CASE), durations.num_failures(_CASE))
    if history.problem:
        raise NotedError(history.problem)
    return seconds


def _write_library(folder: Path) -> None:
    text = (
        'name = "mine"\nsteps = 6\nsave_every = 2\nkeep = 2\nranks = 1\nbatch_size = 2\n'
        f"time_limit_seconds = 60.5\nfrozen = ['a.*']\n{WHOLE}environment.A = 'b'\n"
    )
    (folder / "library.toml").write_text(text)


def _read_library(folder: Path) -> object:
    library = read_library(folder / "library.toml")
    return library, library.kept_steps, library.resume_at, library.split_otherwise()


def _write_losses(folder: Path) -> None:
    lines = [{"step": n, "loss": 3.0 / n, "learning_rate": 1e-3} for n in range(1, 5)]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _read_losses(folder: Path) -> object:
    file = folder / "log.jsonl"
    reader = LossReader(Losses(file=file.name), file.with_name("absent"))
    reader = LossReader(Losses(file=file.name), None)
    reader._file = file
    reader.poll()
    return reader.found


def _write_timeline(folder: Path) -> None:
    timeline = Timeline(folder / "timeline.jsonl", open_device("cpu"))
    for _ in range(2):
        with timeline.phase("set-up"):
            pass
    timeline._file.close()


def _read_timeline(folder: Path) -> object:
    return read_timeline(folder / "timeline.jsonl"), where_it_stopped(folder / "timeline.jsonl")


READERS = (
    Reader("smoke-plan", _write_plan, _choose_items),
    Reader("durations", _write_durations, _expect_seconds),
    Reader("library", _write_library, _read_library),
    Reader("losses", _write_losses, _read_losses),
    Reader("timeline", _write_timeline, _read_timeline),
)
