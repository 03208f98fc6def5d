"""One training library from the outside: its runs, one verdict, files in a folder."""

import shutil
from dataclasses import replace
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
from assay_smoke.external.library import ExternalLibrary, read_library
from assay_smoke.external.running.launches import (
    Launch,
    RunEvidence,
    find_program,
    require_free_ports,
    require_modules,
)
from assay_smoke.external.running.launching import run
from assay_smoke.external.running.losses import LossesError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from assay.devices.base import Device
    from assay_smoke.external.evidence import Evidence, Resumption


def run_external(toml: Path, folder: Path, progress: Progress) -> Verdict:
    """Run the library that `toml` describes uninterrupted, resumed and interrupted, and judge it.

    folder: an existing one; gets a log and the output of every run, and verdict.json. Where the
        verdict is PASS the outputs, which hold checkpoints, are removed.
    Raises: UsageError or MachineError, with nothing left running, for a file that describes no
        library, and for a library that does not do what it describes.
    """
    library = require_runnable(toml)
    device = open_device(library.device)
    with local_folder(resolve_model(library.model), "refuse") as model:
        cycle = _Cycle(library, model, folder, toml.resolve().parent, device, progress)
        evidence = cycle.run()
    from assay_smoke.external.judging.verdict import judge
    from assay_smoke.external.running.timeline import write_timeline

    for one in evidence.runs:
        write_timeline(one, folder)
    verdict, measurements = judge(evidence, toml)
    verdict = write_results(verdict, measurements, folder)
    if verdict.verdict is Outcome.PASS:
        for one in evidence.runs:
            shutil.rmtree(one.launch.output, ignore_errors=True)
    return verdict


def require_runnable(toml: Path) -> ExternalLibrary:
    """The library that `toml` describes, if this machine has what its launch line needs.

    Raises: UsageError or MachineError where a key, a program, a port or a card is wrong or absent.
    """
    library = read_library(toml)
    find_program(library, toml.parent)
    require_free_ports(library)
    device = open_device(library.device)
    here = 0 if device.torch_device == "cpu" else device.count()
    if library.cards > here:
        raise MachineError(
            f"`cards` is {library.cards}, but this machine has {here} of `device` {library.device!r}"
            " (`assay devices` lists all): ask for fewer, or name another device"
        )
    return library


class _Cycle:
    def __init__(
        self,
        library: ExternalLibrary,
        model: Path,
        folder: Path,
        working_folder: Path,
        device: "Device",
        progress: Progress,
    ) -> None:
        self._library, self._model, self._folder = library, model, folder
        self._working_folder, self._device, self._progress = working_folder, device, progress

    def run(self) -> "Evidence":
        """Make the runs, as long as each gives what the next one needs."""
        from assay_smoke.external.evidence import Evidence

        before = _listing(self._model)
        first = run(self._launch("uninterrupted"), self._progress)
        evidence = Evidence(self._library, first)
        require_modules(first)
        if not _ended_well(first):
            return evidence
        if not first.losses:
            raise LossesError.none_found(self._library.losses, first.last_lines)
        if (spacing := _spacing_of(first)) > 1:
            raise LossesError.some_left_out(spacing)
        self._read_checkpoints(evidence)
        middle = evidence.saved.get(self._library.resume_at)
        if middle is not None and middle.problem is None:
            evidence.resumption = self._resume("resumed", first, self._library.resume_at, evidence)
        if self._library.on_sigterm == "checkpoint":
            self._interrupt(evidence)
        self._split_otherwise(evidence)
        after = _listing(self._model)
        evidence.changed_files = sorted(
            name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
        )
        return evidence

    def _launch(
        self,
        name: str,
        resume_from: Path | None = None,
        first_step: int = 0,
        sigterm_after: int | None = None,
    ) -> Launch:
        return Launch(
            name, self._library, self._model, self._folder, self._working_folder, resume_from,
            first_step, sigterm_after, self._device,
        )  # fmt: skip

    def _checkpoints(self, one: RunEvidence) -> dict[int, Path]:
        from assay_smoke.external.checkpoints import checkpoints_of

        return checkpoints_of(one.launch)

    def _read_checkpoints(self, evidence: "Evidence") -> None:
        from assay_smoke.external.checkpoints import (
            CheckpointError,
            checkpoint_pattern,
            read_saved,
            read_start,
        )

        launch = evidence.uninterrupted.launch
        found = self._checkpoints(evidence.uninterrupted)
        if not found:
            raise CheckpointError.none_found(checkpoint_pattern(launch), launch.output)
        with self._progress.task("checkpoints are read", len(found)) as task:
            for step, path in found.items():
                evidence.saved[step] = read_saved(self._library, self._model, path, step)
                task.advance()
        if self._library.checkpoints.kind == "hugging-face":
            last = found[max(found)]
            if evidence.saved[max(found)].problem is None:
                evidence.start = read_start(self._library, self._model, last)

    def _resume(
        self, name: str, source: RunEvidence, step: int, evidence: "Evidence"
    ) -> "Resumption":
        """Go on from the checkpoint that `source` wrote after `step` steps.

        Where that gives another end, the uninterrupted run is repeated, to see how far it differs.
        """
        from assay_smoke.external.checkpoints import copy_until, read_saved
        from assay_smoke.external.evidence import Resumption

        launch = self._launch(name, self._checkpoints(source)[step], step)
        if self._library.resume_in == "copy":
            copy_until(step, source.launch, launch)
            launch = self._launch(name, self._checkpoints(RunEvidence(launch))[step], step)
        resumption = Resumption(run(launch, self._progress))
        end = self._checkpoints(resumption.run).get(self._library.steps)
        if not _ended_well(resumption.run) or end is None:
            return resumption
        resumption.end = read_saved(self._library, self._model, end, self._library.steps)
        expected = evidence.saved.get(self._library.steps)
        is_equal = (
            expected is not None
            and resumption.end.hashes == expected.hashes
            and _values(resumption.run) == _values(evidence.uninterrupted)[step:]
        )
        if not is_equal and resumption.end.problem is None:
            self._measure_spread(resumption, evidence)
        return resumption

    def _measure_spread(self, resumption: "Resumption", evidence: "Evidence") -> None:
        """Repeat the uninterrupted run, and see by how much that differs."""
        from assay_smoke.external.checkpoints import read_tensors
        from assay_smoke.external.spread import measure_spread

        if evidence.repeated is None:
            evidence.repeated = run(self._launch("repeated"), self._progress)
        runs = {
            "uninterrupted": evidence.uninterrupted,
            "repeated": evidence.repeated,
            "resumed": resumption.run,
        }
        ends: dict[str, dict[str, Tensor]] = {}
        for name, one in runs.items():
            end = self._checkpoints(one).get(self._library.steps)
            if not _ended_well(one) or end is None:
                return
            ends[name] = read_tensors(self._library, self._model, end)
        begin = resumption.run.launch.resume_from
        losses = {name: _values(one) for name, one in runs.items()}
        complete = {self._library.steps - len(losses[name]) for name in runs} == {
            0,
            resumption.run.launch.first_step,
        }
        if begin is None or not complete or len(_names_of(ends)) != 1:
            return
        resumption.repeated_differs = losses["repeated"] != losses["uninterrupted"] or any(
            not one.equal(ends["repeated"][name]) for name, one in ends["uninterrupted"].items()
        )
        if resumption.repeated_differs:
            middle = read_tensors(self._library, self._model, begin)
            if middle.keys() == ends["resumed"].keys():
                resumption.spread = measure_spread(losses, ends, middle)

    def _split_otherwise(self, evidence: "Evidence") -> None:
        """Train on the same rows with another split, and measure the distance from the first run."""
        from assay_smoke.external import checkpoints
        from assay_smoke.external.spread import measure_apart

        library = self._library.split_otherwise()
        last = evidence.saved.get(self._library.steps)
        if library is None or last is None or last.problem is not None:
            return
        found = self._checkpoints(evidence.uninterrupted)
        evidence.split_dependence = checkpoints.find_split_dependence(
            found[last.step] / library.checkpoints.model
        )
        if evidence.split_dependence is not None:
            return
        one = run(replace(self._launch("equivalent"), library=library), self._progress)
        evidence.equivalent, end = one, self._checkpoints(one).get(last.step)
        is_whole = len(one.losses) == len(evidence.uninterrupted.losses)
        if end is None or not _ended_well(one) or not is_whole:
            return
        expected = checkpoints.read_tensors(library, self._model, found[last.step])
        evidence.dtype = checkpoints.narrowest_dtype(expected)
        base = checkpoints.read_base(library, self._model, found[min(found)], evidence.dtype)
        try:
            actual = checkpoints.read_tensors(library, self._model, end)
        except AssayError as error:
            evidence.equivalent_problem = str(error)
        else:
            evidence.apart = measure_apart(actual, expected, base)

    def _interrupt(self, evidence: "Evidence") -> None:
        """Send SIGTERM once training runs, and resume from what was saved then."""
        launch = self._launch("interrupted", sigterm_after=1)
        evidence.interrupted = interrupted = run(launch, self._progress)
        found = self._checkpoints(interrupted)
        if not found or interrupted.hung_in is not None:
            return
        evidence.interrupted_at = newest = max(found)
        if newest < self._library.steps:
            evidence.after_sigterm = self._resume("after-sigterm", interrupted, newest, evidence)


def _ended_well(one: RunEvidence) -> bool:
    return one.exit_code == 0 and one.hung_in is None


def _spacing_of(one: RunEvidence) -> int:
    """How many steps lie between two that were logged, where all are equally far apart; else 0."""
    steps = [loss.step for loss in one.losses if loss.step is not None]
    spacings = {later - earlier for earlier, later in pairwise(steps)}
    return spacings.pop() if len(spacings) == 1 else 0


def _values(one: RunEvidence) -> list[float]:
    return [loss.value for loss in one.losses]


def _names_of(ends: "Mapping[str, Mapping[str, Tensor]]") -> set[frozenset[str]]:
    return {frozenset(tensors) for tensors in ends.values()}


def _listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file in a folder."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }
