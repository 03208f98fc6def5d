"""What was seen of an external training library, for `judging` to decide on."""

from dataclasses import dataclass, field

from assay.noise import Ratio
from assay_smoke.external.checkpoints import SavedModel
from assay_smoke.external.library import ExternalLibrary
from assay_smoke.external.running.launches import RunEvidence
from assay_smoke.external.spread import Spread


@dataclass(slots=True)
class Resumption:
    """A run that went on from a checkpoint.

    end: its last checkpoint; None where there is none, or where the run did not end well.
    repeated_differs: whether a second uninterrupted run of the same seed is another one; None where
        it was not made, since the resumed one is equal.
    spread: by how much the resumed run differs, in units of what two uninterrupted ones do; None where
        these are equal, or left nothing to compare.
    """

    run: RunEvidence
    end: SavedModel | None = None
    repeated_differs: bool | None = None
    spread: Spread | None = None

    @property
    def ratios(self) -> list[Ratio]:
        """Those of the spread; none without one."""
        return self.spread.ratios if self.spread is not None else []


@dataclass(slots=True)
class Evidence:
    """All runs of a library.

    start: the initial model, in the dtype of the checkpoints; None for an adapter, which begins with
        random numbers.
    saved: the checkpoints of the uninterrupted run by step.
    changed_files: changed files in the folder of the initial model.
    repeated: a second uninterrupted run, made only where a resumed one differs from the first.
    dtype: dtype of the tensors of the last checkpoint.
    split_dependence: the setting that makes training depend on the split, as "lora_dropout 0.1", or
        None.
    equivalent: the run on the same rows with another split, or None.
    equivalent_problem: why its last checkpoint cannot be read, or None.
    apart: distance of its last checkpoint from the uninterrupted run's, see `measure_apart`; None
        without a checkpoint.
    interrupted: the run that got SIGTERM. interrupted_at: the step of its newest checkpoint, or None.
    after_sigterm: the run that resumed from that checkpoint.
    """

    library: ExternalLibrary
    uninterrupted: RunEvidence
    start: SavedModel | None = None
    saved: dict[int, SavedModel] = field(default_factory=dict)
    changed_files: list[str] = field(default_factory=list)
    repeated: RunEvidence | None = None
    resumption: Resumption | None = None
    dtype: str = "float32"
    split_dependence: str | None = None
    equivalent: RunEvidence | None = None
    equivalent_problem: str | None = None
    apart: float | None = None
    interrupted: RunEvidence | None = None
    interrupted_at: int | None = None
    after_sigterm: Resumption | None = None

    @property
    def runs(self) -> list[RunEvidence]:
        """All that were made, in their order."""
        resumptions = [one.run for one in (self.resumption, self.after_sigterm) if one is not None]
        others = (self.repeated, self.interrupted, self.equivalent)
        made = [one for one in others if one is not None]
        return [self.uninterrupted, *resumptions[:1], *made, *resumptions[1:]]
