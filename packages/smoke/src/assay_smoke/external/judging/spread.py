"""How far a resumed run is from the uninterrupted one, and how far two uninterrupted runs are apart."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from assay.noise import Ratio
from assay.training.judging.free_run import relative_error_of_losses


def spread_ratios(
    losses: Mapping[str, Sequence[float]], ends: Mapping[str, Mapping[str, Tensor]]
) -> list[Ratio]:
    """The errors of the resumed run in units of those of a repeated one.

    No floor: half a unit roundoff of bfloat16 weights is about what a few steps change of them.

    losses: of the same steps; ends: the tensors that training ends with; each for `uninterrupted`,
        `repeated` and `resumed`, all with the same lengths and names.
    """
    expected, end = list(losses["uninterrupted"]), ends["uninterrupted"]
    of_losses = [
        relative_error_of_losses(list(losses[run]), expected) for run in ("resumed", "repeated")
    ]
    of_ends = [_relative_error(ends[run], end) for run in ("resumed", "repeated")]
    return [Ratio("loss-error", *of_losses), Ratio("trajectory-error", *of_ends)]


def _relative_error(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Of all tensors together: the norm of the difference over that of what was expected."""
    error = sum(
        float((actual[name].double() - one.double()).square().sum())
        for name, one in expected.items()
    )
    size = sum(float(one.double().square().sum()) for one in expected.values())
    return float((error / size) ** 0.5) if size else float("inf")
