"""The evidence from the runs of a training library, and the distances between their ends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite

from torch import Tensor

from assay.noise import Ratio
from assay.training.judging.free_run import relative_error_of_losses
from assay_smoke.external.checkpoints import SavedModel
from assay_smoke.external.library import ExternalLibrary
from assay_smoke.external.running.launch import RunEvidence

# Losses are logged with at most float32 precision: 2^-23 is its relative spacing at powers of two.
_LOGGED = 2.0**-23

_PERCENTILE = 0.85


@dataclass(frozen=True, slots=True)
class Spread:
    """Errors of a resumed run relative to those of a repeated one."""

    losses: Ratio
    ends: Ratio
    moved: float
    """Change by training since the checkpoint, in the unit of the error of the ends."""

    @property
    def ratios(self) -> list[Ratio]:
        """Return both ratios."""
        return [self.losses, self.ends]


def measure_spread(
    losses: Mapping[str, Sequence[float]],
    ends: Mapping[str, Mapping[str, Tensor]],
    middle: Mapping[str, Tensor],
) -> Spread:
    """Measure a resumed run against the difference of two uninterrupted ones.

    The noise of losses is at least their logged precision. The noise of ends has no floor: a few steps
    change bfloat16 weights by about half a unit roundoff.

    losses: of all steps for `uninterrupted` and `repeated`, of the last steps for `resumed`; ends: final
        tensors of each; middle: tensors of the checkpoint.
    """
    whole, end = list(losses["uninterrupted"]), ends["uninterrupted"]
    resumed = list(losses["resumed"])
    begin = len(whole) - len(resumed)
    # Two runs may agree by chance in some steps, so the larger of both windows counts.
    noise = max(
        _LOGGED,
        relative_error_of_losses(list(losses["repeated"]), whole),
        relative_error_of_losses(list(losses["repeated"])[begin:], whole[begin:]),
    )
    return Spread(
        Ratio("loss-error", relative_error_of_losses(resumed, whole[begin:]), noise),
        Ratio(
            "trajectory-error",
            _relative_error(ends["resumed"], end),
            _relative_error(ends["repeated"], end),
        ),
        _relative_error(middle, end),
    )


def measure_apart(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], base: Mapping[str, Tensor]
) -> float:
    """Measure the distance of two final states, relative to the change by training in each tensor.

    base: the tensors that training began with, or those of an early checkpoint.
    Returns: the 85th percentile over tensors; inf if the states hold different tensors, or one holds
        NaN or infinity. The gradient of up to one tensor in twelve, such as a key's bias, is only
        rounding. Its final value is arbitrary.
    """
    if not actual.keys() == expected.keys() == base.keys():
        return inf
    shares = []
    for name, one in expected.items():
        moved = float((one.double() - base[name].double()).norm())
        error = float((actual[name].double() - one.double()).norm())
        if not isfinite(error):
            return inf
        if error or moved:
            shares.append(error / moved if moved else inf)
    return sorted(shares)[int(_PERCENTILE * len(shares))] if shares else 0.0


def _relative_error(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference over that of `expected`, over all tensors together."""
    error = sum(
        float((actual[name].double() - one.double()).square().sum())
        for name, one in expected.items()
    )
    size = sum(float(one.double().square().sum()) for one in expected.values())
    return float((error / size) ** 0.5) if size else float("inf")


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
