"""The runs of a training library, and its checkpoints."""

from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from assay.errors import AssayError
from assay.models.loading.loaded_model import stored_dtype
from assay.runs import Progress
from assay_smoke.external import checkpoints
from assay_smoke.external.checkpoints import SavedModel, checkpoints_of, load_tensors
from assay_smoke.external.evidence import Resumption, RunEvidence
from assay_smoke.external.launch import Launch
from assay_smoke.external.library import ExternalLibrary
from assay_smoke.external.losses import LossesError
from assay_smoke.external.watched_run import run

# The order in which runs are reported.
_ORDER = ("uninterrupted", "resumed", "repeated", "interrupted", "equivalent", "after-sigterm")


@dataclass
class Cycle:
    """The runs of a library. A level that needs another run makes it."""

    launch: Launch
    """Of the uninterrupted run. The others differ from it."""
    progress: Progress
    made: dict[str, RunEvidence] = field(default_factory=dict)
    """Runs by name."""
    saved: dict[int, SavedModel] = field(default_factory=dict)
    """Checkpoints of the uninterrupted run by step; none if it ended badly."""
    start: SavedModel | None = None
    """The initial model in the dtype of the checkpoints; None for an adapter, which begins at random."""
    resumptions: dict[str, Resumption] = field(default_factory=dict)
    """By level."""
    _files: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def library(self) -> ExternalLibrary:
        """Return the library."""
        return self.launch.library

    @property
    def uninterrupted(self) -> RunEvidence:
        """Return the first run."""
        return self.made["uninterrupted"]

    @property
    def runs(self) -> list[RunEvidence]:
        """Return the runs made so far, in the order of reports."""
        return [self.made[name] for name in _ORDER if name in self.made]

    @property
    def last(self) -> SavedModel | None:
        """Return the last checkpoint of the uninterrupted run."""
        return self.saved.get(self.library.steps)

    @property
    def changed_files(self) -> list[str]:
        """Return the files of the initial model's folder that changed since the first run began."""
        after = _listing(self.launch.model)
        names = self._files.keys() | after.keys()
        return sorted(name for name in names if self._files.get(name) != after.get(name))

    def run(self, name: str, **changes: Any) -> RunEvidence:  # noqa: ANN401 - fields of a launch
        """Make the run `name`. changes: of its launch."""
        self.made[name] = run(replace(self.launch, name=name, **changes), self.progress)
        return self.made[name]

    def end_of(self, one: RunEvidence) -> Path | None:
        """Return the folder of a run's last checkpoint; None without one or after a bad end."""
        return checkpoints_of(one.launch).get(self.library.steps) if one.ended_well else None

    def begin(self) -> None:
        """Make the uninterrupted run and read its checkpoints.

        Raises: MachineError for an absent package; UsageError for a library that contradicts its file.
        """
        self._files = _listing(self.launch.model)
        first = self.run("uninterrupted")
        first.require_modules()
        if not first.ended_well:
            return
        self._require_losses(first)
        found = checkpoints_of(self.launch)
        if not found:
            raise checkpoints.make_checkpoint_error(self.launch)
        start = None
        if self.library.checkpoints.kind == "hugging-face":
            with suppress(AssayError):  # the level `checkpoint` says why it cannot be read
                last = found[max(found)] / self.library.checkpoints.model
                start = load_tensors(self.launch.model, stored_dtype(str(last), "refuse"))
                self.start = checkpoints.saved_of(0, start)
        with self.progress.task("reads checkpoints", len(found)) as task:
            for saved in checkpoints.read_history(self.launch, found, start):
                self.saved[saved.step] = saved
                task.advance()

    def _require_losses(self, first: RunEvidence) -> None:
        losses = self.library.losses
        if not first.losses:
            where = (
                f"no line of its output matches losses.pattern, {losses.pattern!r}"
                if losses.pattern is not None
                else f"losses.file, {losses.file}, is absent or empty"
            )
            raise LossesError(f"the launch line logs no losses: {where}.{first.last_lines}")
        steps = [loss.step for loss in first.losses if loss.step is not None]
        spacings = {later - earlier for earlier, later in pairwise(steps)}
        if len(spacings) == 1 and (spacing := spacings.pop()) > 1:
            raise LossesError(
                f"a loss is logged every {spacing} steps, but every step is needed: set the library's"
                " logging interval to 1"
            )


def _listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and modification time of every file in a folder."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }
