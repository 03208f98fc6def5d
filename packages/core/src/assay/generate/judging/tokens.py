"""The tokens level: the same text, or a first difference that is or is not a near-tie."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Two tokens are nearly tied within this many times the noise of their gap, which is twice that of a
# logit: eight times a logit's, as for the choices of a router (assay/locating/matching/routing.py).
NEAR_TIE = 4.0


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where the candidate's own text leaves the reference's.

    step: number of the generated token; gap: reference logit of the reference's token minus that
    of the candidate's, nats; noise: how much the noise run changes this gap at such a token.
    """

    row: int
    step: int
    expected: int
    actual: int
    gap: float
    noise: float
    limit: float

    @property
    def is_near_tie(self) -> bool:
        """Whether noise alone decides between the two tokens. A NaN decides nothing."""
        return self.gap <= self.limit * self.noise


def first_differences(
    actual_BN: Tensor,
    expected_BN: Tensor,
    expected_logits_BNV: Tensor,
    noise_logits_BNV: Tensor,
    limit: float,
) -> list[FirstDifference]:
    """The first difference of every row that has one. Lengths must agree.

    Up to there both runs saw the same tokens, so the reference's logits show how close the
    choice was. Their noise: the largest change of any logit gap at this token between reference and noise
    run, at least the root mean square over all tokens.
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
    """Number of equal tokens up to the first difference of each row."""
    same = torch.cummin((actual_BN == expected_BN).long(), dim=1).values
    return int(same.sum())
