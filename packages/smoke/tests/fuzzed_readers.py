"""Readers of this package for the fuzz: library files, losses, timelines."""

import json
from pathlib import Path

from assay.devices.registry import open_device
from assay_smoke.external.library import Losses, read_library
from assay_smoke.external.watched_run import LossReader
from assay_smoke.timelines import Timeline, read_timeline, where_it_stopped
from packages.core.tests.fuzz.reader import Reader
from packages.smoke.tests.unit.external.test_library import WHOLE


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
    Reader("library", _write_library, _read_library),
    Reader("losses", _write_losses, _read_losses),
    Reader("timeline", _write_timeline, _read_timeline),
)
