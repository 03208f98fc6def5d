"""Runs a training library uninterrupted, resumed and interrupted, and judges it."""

import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from assay.devices.registry import open_device
from assay.errors import AssayError, MachineError
from assay.models.folders import local_folder
from assay.models.sources import resolve_model
from assay.runs import Progress
from assay.runs.results import write_results
from assay.verdicts import Outcome, Verdict
from assay_smoke.external import checkpoints
from assay_smoke.external.checkpoints import checkpoints_of, read_saved, read_tensors
from assay_smoke.external.evidence import Evidence, Resumption, measure_apart, measure_spread
from assay_smoke.external.judging.verdict import judge
from assay_smoke.external.library import ExternalLibrary, read_library
from assay_smoke.external.running.launch import (
    Launch,
    RunEvidence,
    require_free_ports,
    require_modules,
    require_program,
    write_timeline,
)
from assay_smoke.external.running.losses import LossesError
from assay_smoke.external.running.watched_run import run

if TYPE_CHECKING:
    from torch import Tensor


def run_external(toml: Path, folder: Path, progress: Progress) -> Verdict:
    """Run the library that `toml` describes, and judge it.

    folder: an existing one. It gets a log and the output of every run, and verdict.json. After a
        PASS, the outputs with their checkpoints are removed.
    Raises: UsageError or MachineError, with nothing left running, for a file that does not describe
        a library, and for a library that contradicts its file.
    """
    library = require_runnable(toml)
    device = open_device(library.device)
    with local_folder(resolve_model(library.model), "refuse") as model:
        first = Launch("uninterrupted", library, model, folder, toml.resolve().parent, device)
        evidence = _Cycle(first, progress).run()
    for one in evidence.runs:
        write_timeline(one, folder)
    verdict, measurements = judge(evidence, toml)
    verdict = write_results(verdict, measurements, folder)
    if verdict.verdict is Outcome.PASS:
        for one in evidence.runs:
            shutil.rmtree(one.launch.output, ignore_errors=True)
    return verdict


def require_runnable(toml: Path) -> ExternalLibrary:
    """Read the library that `toml` describes, and check what its launch line needs of this machine.

    Raises: UsageError or MachineError for a wrong key, program, port or number of cards.
    """
    library = read_library(toml)
    require_program(library, toml.parent)
    require_free_ports(library)
    device = open_device(library.device)
    here = 0 if device.torch_device == "cpu" else device.count()
    if library.cards > here:
        raise MachineError(
            f"`cards` is {library.cards}, but this machine has {here} of `device` {library.device!r}"
            " (`assay devices` lists all): ask for fewer, or name another device"
        )
    return library


@dataclass(frozen=True)
class _Cycle:
    """The runs of a library, each as long as the previous ones give what it needs."""

    launch: Launch
    """Of the uninterrupted run. The others differ from it."""
    progress: Progress

    @property
    def library(self) -> ExternalLibrary:
        """Return the library."""
        return self.launch.library

    def run(self) -> Evidence:
        """Make the runs."""
        library, before = self.library, _listing(self.launch.model)
        first = run(self.launch, self.progress)
        evidence = Evidence(library, first)
        require_modules(first)
        if not _ended_well(first):
            return evidence
        if not first.losses:
            losses = library.losses
            where = (
                f"no line of its output matches losses.pattern, {losses.pattern!r}"
                if losses.pattern is not None
                else f"losses.file, {losses.file}, is absent or empty"
            )
            raise LossesError(f"the launch line logs no losses: {where}.{first.last_lines}")
        if (spacing := _spacing_of(first)) > 1:
            raise LossesError(
                f"a loss is logged every {spacing} steps, but every step is needed: set the library's"
                " logging interval to 1"
            )
        self._read_checkpoints(evidence)
        middle = evidence.saved.get(library.resume_at)
        if middle is not None and middle.problem is None:
            evidence.resumption = self._resume("resumed", first, library.resume_at, evidence)
        if library.on_sigterm == "checkpoint":
            self._interrupt(evidence)
        self._run_equivalent(evidence)
        after = _listing(self.launch.model)
        evidence.changed_files = sorted(
            name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
        )
        return evidence

    def _read_checkpoints(self, evidence: Evidence) -> None:
        launch = evidence.uninterrupted.launch
        found = checkpoints_of(launch)
        if not found:
            pattern = checkpoints.checkpoint_pattern(launch)
            raise checkpoints.make_checkpoint_error(pattern, launch.output)
        start = None
        if self.library.checkpoints.kind == "hugging-face":
            with suppress(AssayError):  # the level `checkpoint` says why it cannot be read
                start = checkpoints.read_start(launch, found[max(found)])
                evidence.start = checkpoints.saved_of(0, start)
        with self.progress.task("reads checkpoints", len(found)) as task:
            for saved in checkpoints.read_history(launch, found, start):
                evidence.saved[saved.step] = saved
                task.advance()

    def _resume(self, name: str, source: RunEvidence, step: int, evidence: Evidence) -> Resumption:
        """Resume from the checkpoint that `source` wrote after `step` steps.

        If the end differs, repeat the uninterrupted run to measure how far two such runs differ.
        """
        begin = checkpoints_of(source.launch)[step]
        launch = replace(self.launch, name=name, resume_from=begin, first_step=step)
        if self.library.resume_in == "copy":
            checkpoints.copy_until(step, source.launch, launch)
            launch = replace(launch, resume_from=checkpoints_of(launch)[step])
        resumption = Resumption(run(launch, self.progress))
        end = checkpoints_of(launch).get(self.library.steps)
        if not _ended_well(resumption.run) or end is None:
            return resumption
        resumption.end = read_saved(launch, end, self.library.steps)
        expected = evidence.saved.get(self.library.steps)
        is_equal = (
            expected is not None
            and resumption.end.hashes == expected.hashes
            and _values(resumption.run) == _values(evidence.uninterrupted)[step:]
        )
        if not is_equal and resumption.end.problem is None:
            self._measure_spread(resumption, evidence)
        return resumption

    def _measure_spread(self, resumption: Resumption, evidence: Evidence) -> None:
        """Repeat the uninterrupted run and measure how far both differ."""
        if evidence.repeated is None:
            evidence.repeated = run(replace(self.launch, name="repeated"), self.progress)
        runs = {
            "uninterrupted": evidence.uninterrupted,
            "repeated": evidence.repeated,
            "resumed": resumption.run,
        }
        ends: dict[str, dict[str, Tensor]] = {}
        for name, one in runs.items():
            end = checkpoints_of(one.launch).get(self.library.steps)
            if not _ended_well(one) or end is None:
                return
            ends[name] = read_tensors(one.launch, end)
        begin = resumption.run.launch.resume_from
        losses = {name: _values(one) for name, one in runs.items()}
        complete = {self.library.steps - len(losses[name]) for name in runs} == {
            0,
            resumption.run.launch.first_step,
        }
        if begin is None or not complete or len({frozenset(one) for one in ends.values()}) != 1:
            return
        resumption.repeated_differs = losses["repeated"] != losses["uninterrupted"] or any(
            not one.equal(ends["repeated"][name]) for name, one in ends["uninterrupted"].items()
        )
        if resumption.repeated_differs:
            middle = read_tensors(resumption.run.launch, begin)
            if middle.keys() == ends["resumed"].keys():
                resumption.spread = measure_spread(losses, ends, middle)

    def _run_equivalent(self, evidence: Evidence) -> None:
        """Train on the same rows with another split and measure the distance from the first run."""
        library = self.library.split_otherwise()
        last = evidence.saved.get(self.library.steps)
        if library is None or last is None or last.problem is not None:
            return
        found = checkpoints_of(evidence.uninterrupted.launch)
        evidence.split_dependence = checkpoints.find_split_dependence(
            found[last.step] / library.checkpoints.model
        )
        if evidence.split_dependence is not None:
            return
        one = run(replace(self.launch, name="equivalent", library=library), self.progress)
        evidence.equivalent, end = one, checkpoints_of(one.launch).get(last.step)
        is_whole = len(one.losses) == len(evidence.uninterrupted.losses)
        if end is None or not _ended_well(one) or not is_whole:
            return
        expected = read_tensors(one.launch, found[last.step])
        evidence.dtype = checkpoints.narrowest_dtype(expected)
        base = checkpoints.read_base(one.launch, found[min(found)], evidence.dtype)
        try:
            actual = read_tensors(one.launch, end)
        except AssayError as error:
            evidence.equivalent_problem = str(error)
        else:
            evidence.apart = measure_apart(actual, expected, base)

    def _interrupt(self, evidence: Evidence) -> None:
        """Send SIGTERM after the first step, and resume from the checkpoint that follows."""
        launch = replace(self.launch, name="interrupted", sigterm_after=1)
        evidence.interrupted = interrupted = run(launch, self.progress)
        found = checkpoints_of(launch)
        if not found or interrupted.hung_in is not None:
            return
        evidence.interrupted_at = newest = max(found)
        if newest < self.library.steps:
            evidence.after_sigterm = self._resume("after-sigterm", interrupted, newest, evidence)


def _ended_well(one: RunEvidence) -> bool:
    return one.exit_code == 0 and one.hung_in is None


def _spacing_of(one: RunEvidence) -> int:
    """Return the distance of logged steps if it is constant, otherwise 0."""
    steps = [loss.step for loss in one.losses if loss.step is not None]
    spacings = {later - earlier for earlier, later in pairwise(steps)}
    return spacings.pop() if len(spacings) == 1 else 0


def _values(one: RunEvidence) -> list[float]:
    return [loss.value for loss in one.losses]


def _listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and modification time of every file in a folder."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }
