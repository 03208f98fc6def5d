"""The expected noise of a healthy run, where there is no noise run."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from assay.comparison.measuring.pair_measurer import MeasuredPorts
from assay.comparison.pairing.experts import ScoreNoise
from assay.comparison.pairing.port_series import Port
from assay.dtypes import FORMATS, float_format

# Without a noise run, the expected relative error is this many unit roundoffs, times the square root of
# the number of blocks passed.
ROUNDOFFS = 4.0

# The same for gradients, which are sums over all tokens with terms that cancel. In a trained model of 4
# blocks, a float32 step differs from float64 by up to 48 unit roundoffs per root of a block, in its k_proj.
TRAINING_ROUNDOFFS = 64.0

# Activations and gradients differ by up to this many times the relative difference of the weights, per root
# of a block: measured in 4 steps of AdamW on two ranks against one.
ACTIVATION_DRIFT = 2.0
GRADIENT_DRIFT = 4.0

# The relative change of a weight in one step of Adam, assumed where weights are not recorded: a learning rate
# of 1e-3 and weights of 0.05.
UPDATE_SIZE = 0.02


@dataclass(frozen=True, slots=True)
class NoiseLaw:
    """The expected relative error without a noise run."""

    unit_roundoff: float
    num_blocks: int = 0
    drift: Mapping[int, float] = field(default_factory=dict)
    """Relative difference of all parameters at the start of each training step."""

    def expected(self, port: Port, depth: int, step: int = 0) -> float:
        """Return the error of a port after `depth` blocks, in a training step."""
        drift = self._drift_at(step)
        if port.phase == "forward":
            return (ROUNDOFFS * self.unit_roundoff + ACTIVATION_DRIFT * drift) * math.sqrt(
                1 + depth
            )
        # The backward pass visits all blocks again.
        return self.gradient_roundoff + GRADIENT_DRIFT * drift * self._blocks

    @property
    def _blocks(self) -> float:
        return math.sqrt(1 + 2 * self.num_blocks)

    @property
    def gradient_roundoff(self) -> float:
        """Return the error of gradients if the weights are equal."""
        return TRAINING_ROUNDOFFS * self.unit_roundoff * self._blocks

    def _drift_at(self, step: int) -> float:
        if step in self.drift or not step:
            return self.drift.get(step, 0.0)
        return step * UPDATE_SIZE * adam_error(self.gradient_roundoff)


def adam_error(gradient_error: float) -> float:
    """Return the relative error of an update of Adam from the relative error of its gradient.

    Adam divides a gradient by its size. Where the gradient is below its noise, the update has a random sign.
    The fraction of such elements is about the relative error.
    """
    return math.sqrt(gradient_error)


def expected_score_noise(unit_roundoff: float) -> ScoreNoise:
    """Return a function that derives the noise of router scores from dtype and depth."""

    def noise(port: Port, scores: Tensor) -> float:
        expected = NoiseLaw(unit_roundoff).expected(port, count_blocks(port.module))
        return expected * float(scores.double().pow(2).mean().sqrt())

    return noise


def measured_score_noise(noise: MeasuredPorts, otherwise: ScoreNoise) -> ScoreNoise:
    """Return a function that reads the noise of router scores, and falls back to `otherwise`."""

    def measured(port: Port, scores: Tensor) -> float:
        found = noise.of(port)
        if not found or not found[0].sums.num_elements:
            return otherwise(port, scores)
        return math.sqrt(found[0].sums.dd / found[0].sums.num_elements)

    return measured


def count_blocks(module: str) -> int:
    """Return the number of blocks up to a module, from the first number in its path."""
    number = re.search(r"\.(\d+)(?:\.|$)", module)
    return int(number[1]) + 1 if number else 0


def coarser_unit(dtypes: Iterable[str]) -> float:
    """Return the largest unit roundoff of the floating dtypes, or of float32 without any."""
    units = [float_format(name).unit_roundoff for name in dtypes if name in FORMATS]
    return max(units, default=float_format("float32").unit_roundoff)
