"""Find the wrong head of an attention module, by the input of its output projection.

Shape legend: C channels of all heads, H heads, D channels of one head.
"""

from collections.abc import Iterable

from torch import Tensor

from assay.comparing.judge import FailedStage
from assay.comparing.results import PortResult, ReplayResults

# If one head is wrong, it has nearly all of the excess error; with two wrong heads neither has.
_OWN_SHARE = 0.9


def describe_wrong_head(
    origin: FailedStage, candidate: ReplayResults, noise: ReplayResults
) -> str | None:
    """Name the one wrong head of the stage `origin`; None if there is not exactly one."""
    ports = [port for port in candidate.ports.values() if port.stage == origin.stage]
    width = _width_of_heads(ports)
    if width is None:
        return None
    for port in ports:
        reference = noise.ports.get((port.module, port.port))
        actual, expected = _squares(port), _squares(reference)
        if actual is None or len(actual) <= width or len(actual) % width:
            continue
        if expected is not None and expected.shape == actual.shape:
            actual = (actual - expected).clamp(min=0)
        excess_H = actual.unflatten(0, (-1, width)).sum(1)
        worst = int(excess_H.argmax())
        if float(excess_H[worst]) > _OWN_SHARE * float(excess_H.sum()):
            return f"the error of {origin.stage} is in head {worst} of {len(excess_H)}"
    return None


def _width_of_heads(ports: Iterable[PortResult]) -> int | None:
    """Return D, read from the cache entries of the stage, (..., D); None without a cache."""
    for port in ports:
        is_cache = port.port.startswith("changed.") and port.port.endswith((".keys", ".values"))
        if is_cache and port.sums.channel is not None:
            return int(port.sums.channel.shape[1])
    return None


def _squares(port: PortResult | None) -> Tensor | None:
    """Return the sum of squared errors of each channel, (C,)."""
    if port is None or port.sums.channel is None:
        return None
    squares: Tensor = port.sums.channel[3]
    return squares
