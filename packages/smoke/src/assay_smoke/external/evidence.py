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

    start: the model that training begins with, in the dtype of the checkpoints; of an adapter none,
        since it begins with random numbers of its own.
    saved: the checkpoints of the uninterrupted run by step.
    changed_files: of the folder of the model that training begins with.
    repeated: a second uninterrupted run, made only where a resumed one differs from the first.
    dtype: of the tensors of the last checkpoint; split_dependence: what in its configuration makes
        training depend on the split by design, as "lora_dropout 0.1"; None for nothing.
    equivalent: the run with the same rows split otherwise; None where the library has none.
    apart: how far its last checkpoint is from the uninterrupted run's, as `measure_apart` says; None
        where it left none.
    interrupted: the run that was sent SIGTERM; interrupted_at: the step of its newest checkpoint,
        None for none; after_sigterm: the run that went on from that.
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
