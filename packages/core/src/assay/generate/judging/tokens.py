"""The tokens level: the first difference of each text, and whether it is a near tie."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Two tokens are nearly tied within this many times the noise of their gap, which is twice the noise
# of a logit: eight times a logit's noise, as for the choices of a router (expert_routing.py).
NEAR_TIE = 4.0


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first token of a text that differs from the reference's."""

    row: int
    step: int
    """Index of the generated token."""
    expected: int
    actual: int
    gap: float
    """Reference logit of the expected token minus that of the actual one, nats."""
    noise: float
    """Change of this gap in the noise run."""
    limit: float

    @property
    def is_near_tie(self) -> bool:
        """Return True if noise alone can decide between the two tokens; False for a NaN."""
        return self.gap <= self.limit * self.noise


def first_differences(
    actual_BN: Tensor,
    expected_BN: Tensor,
    expected_logits_BNV: Tensor,
    noise_logits_BNV: Tensor,
    limit: float,
) -> list[FirstDifference]:
    """Find the first difference of every row that has one. Lengths must agree.

    Both runs saw the same tokens until then, so the reference's logits show how close the choice was.
    The noise is the larger change of the two logits between reference and noise run, and at least
    the root mean square over all tokens; twice that for the gap.
    """
    if actual_BN.shape != expected_BN.shape:
        raise ValueError(f"{tuple(actual_BN.shape)} tokens, expected {tuple(expected_BN.shape)}")
    change_BNV = noise_logits_BNV.double() - expected_logits_BNV.double()
    change_BNV = change_BNV - change_BNV.mean(-1, keepdim=True)
    typical = float(change_BNV.pow(2).mean().sqrt())
    found = []
    for row in range(actual_BN.shape[0]):
        steps = (actual_BN[row] != expected_BN[row]).nonzero()
        if not len(steps):
            continue
        step = int(steps[0])
        expected, actual = int(expected_BN[row, step]), int(actual_BN[row, step])
        logits = expected_logits_BNV[row, step].double()
        change = change_BNV[row, step]
        local = max(abs(float(change[expected])), abs(float(change[actual])))
        found.append(
            FirstDifference(
                row, step, expected, actual, float(logits[expected] - logits[actual]),
                2 * max(local, typical), limit,
            )
        )  # fmt: skip
    return found


def count_equal(actual_BN: Tensor, expected_BN: Tensor) -> int:
    """Count the equal tokens up to the first difference of each row."""
    same = torch.cummin((actual_BN == expected_BN).long(), dim=1).values
    return int(same.sum())
