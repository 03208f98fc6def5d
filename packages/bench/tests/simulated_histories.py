"""Histories of ratios as machines give them: noise, outliers, drift that the control sees in part."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Noise:
    """Of one suite on one kind of machine.

    run, control: standard deviations, in logarithms, of the suite's and of the control's time between
        runs. outlier_share: of the runs; each takes up to half as long again, or longer.
    drift: standard deviation, in logarithms, of the machine's speed over the history, which changes
        slowly. seen: the share of it that the suite follows; the control follows all of it.
    """

    run: float = 0.02
    control: float = 0.01
    outlier_share: float = 0.05
    drift: float = 0.05
    seen: float = 0.9


def simulate_ratios(
    seed: int, num_runs: int = 40, changes: Sequence[tuple[int, float]] = (), noise: Noise = Noise()
) -> list[float]:
    """Ratios of a suite to its control; from each index of `changes` on its time is multiplied."""
    rng = np.random.default_rng(seed)
    speed = noise.drift * _slow_drift(rng, num_runs)
    suite = np.full(num_runs, np.log(5.0)) + noise.seen * speed
    suite += noise.run * rng.standard_normal(num_runs)
    is_outlier = rng.random(num_runs) < noise.outlier_share
    suite += is_outlier * rng.exponential(0.2, num_runs)
    for index, factor in changes:
        suite[index:] += np.log(factor)
    control = speed + noise.control * rng.standard_normal(num_runs)
    return [float(ratio) for ratio in np.exp(suite - control)]


def _slow_drift(rng: np.random.Generator, num_runs: int) -> NDArray[np.float64]:
    """Of standard deviation 1: a wave of one to two periods over the history, and a random walk."""
    phase, periods = rng.random(2)
    wave = np.sin(2 * np.pi * (phase + (1 + periods) * np.arange(num_runs) / num_runs))
    walk = np.cumsum(rng.standard_normal(num_runs))
    drift = wave / wave.std() + (walk - walk.mean()) / walk.std()
    standard: NDArray[np.float64] = (drift - drift.mean()) / drift.std()
    return standard
