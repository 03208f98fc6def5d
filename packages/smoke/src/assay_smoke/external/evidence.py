"""The evidence from the runs of a training library."""

from dataclasses import dataclass, field

from assay.noise import Ratio
from assay_smoke.external.checkpoints import SavedModel
from assay_smoke.external.library import ExternalLibrary
from assay_smoke.external.running.launch import RunEvidence
from assay_smoke.external.spread import Spread


@dataclass(slots=True)
class Resumption:
    """A run that resumed from a checkpoint."""

    run: RunEvidence
    end: SavedModel | None = None
    """Its last checkpoint; None if there is none or the run ended badly."""
    repeated_differs: bool | None = None
    """Whether two uninterrupted runs of one seed differ; None if the resumed run is equal."""
    spread: Spread | None = None
    """Distance of the resumed run relative to that of two uninterrupted runs; None if these are equal or
    left nothing to compare.
    """

    @property
    def ratios(self) -> list[Ratio]:
        """Return the ratios of the spread."""
        return self.spread.ratios if self.spread is not None else []


@dataclass(slots=True)
class Evidence:
    """The evidence from all runs of a library."""

    library: ExternalLibrary
    uninterrupted: RunEvidence
    start: SavedModel | None = None
    """The initial model in the dtype of the checkpoints; None for an adapter, which begins at random."""
    saved: dict[int, SavedModel] = field(default_factory=dict)
    """Checkpoints of the uninterrupted run by step."""
    changed_files: list[str] = field(default_factory=list)
    """Changed files in the folder of the initial model."""
    repeated: RunEvidence | None = None
    """A second uninterrupted run, made only if a resumed one differs from the first."""
    resumption: Resumption | None = None
    dtype: str = "float32"
    """Dtype of the tensors of the last checkpoint."""
    split_dependence: str | None = None
    """Setting that makes training depend on the split, as "lora_dropout 0.1"."""
    equivalent: RunEvidence | None = None
    """The run on the same rows with another split."""
    equivalent_problem: str | None = None
    """Why its last checkpoint cannot be read."""
    apart: float | None = None
    """Distance of its last checkpoint from the uninterrupted run's; see `measure_apart`."""
    interrupted: RunEvidence | None = None
    """The run that got SIGTERM."""
    interrupted_at: int | None = None
    """Step of its newest checkpoint."""
    after_sigterm: Resumption | None = None
    """The run that resumed from that checkpoint."""

    @property
    def runs(self) -> list[RunEvidence]:
        """Return all runs in order."""
        resumptions = [one.run for one in (self.resumption, self.after_sigterm) if one is not None]
        others = (self.repeated, self.interrupted, self.equivalent)
        made = [one for one in others if one is not None]
        return [self.uninterrupted, *resumptions[:1], *made, *resumptions[1:]]
