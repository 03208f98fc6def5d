"""Measures how far a resumed run is from an uninterrupted one, and two uninterrupted runs are apart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from assay.noise import Ratio
from assay.training.judging.free_run import relative_error_of_losses

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
    Returns: the 85th percentile over tensors; inf if the states hold different tensors. The
        gradient of up to one tensor in twelve, such as a key's bias, is only rounding. Its final
        value is arbitrary.
    """
    if not actual.keys() == expected.keys() == base.keys():
        return float("inf")
    shares = []
    for name, one in expected.items():
        moved = float((one.double() - base[name].double()).norm())
        error = float((actual[name].double() - one.double()).norm())
        if error or moved:
            shares.append(error / moved if moved else float("inf"))
    return sorted(shares)[int(_PERCENTILE * len(shares))] if shares else 0.0


def _relative_error(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference over that of `expected`, over all tensors together."""
    error = sum(
        float((actual[name].double() - one.double()).square().sum())
        for name, one in expected.items()
    )
    size = sum(float(one.double().square().sum()) for one in expected.values())
    return float((error / size) ** 0.5) if size else float("inf")
