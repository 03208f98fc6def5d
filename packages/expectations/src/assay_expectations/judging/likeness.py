"""Explanations of wrong values by a single change of all logits.

Shapes: R tokens, K kept ids and the rest.
"""

import numpy as np

from assay.stages import Statistic
from assay_expectations.judging.numbers import (
    Array,
    JudgedSignature,
    centred,
    relative_errors,
    rms,
    rows_of,
)
from assay_expectations.records import Observed, Signature

_STATISTIC: Statistic = "logits-error"


def describe_likeness(
    signature: Signature, observed: Observed, dtype: str, judged: JudgedSignature
) -> str | None:
    """Describe the single change that explains the difference; return None if no known change does.

    dtype: the expected dtype.
    """
    if observed.dtype != dtype:
        return f"the model's parameters are {observed.dtype}, expected {dtype}"
    expected_RK = rows_of(signature.yardstick.log_probabilities)
    actual_RK = rows_of(observed.distributions.log_probabilities)
    if not np.isfinite(actual_RK[np.isfinite(expected_RK)]).all():
        tokens = int((~np.isfinite(actual_RK) & np.isfinite(expected_RK)).any(axis=1).sum())
        return f"the log-probabilities of {tokens} of {len(actual_RK)} tokens are not finite"
    by_statistic = {one.ratio.statistic: one for one in judged.judged}
    most = by_statistic[_STATISTIC].limit * by_statistic[_STATISTIC].ratio.expected
    within = {name for name, one in by_statistic.items() if one.ratio.value <= one.limit}
    if _STATISTIC in within:
        num_kept = actual_RK.shape[1] - 1
        # Errors of single tokens have no common explanation.
        return (
            f"the {num_kept} most likely ids of each token agree; the error is in the rest of the"
            " vocabulary"
            if "logits-worst" in within
            else None
        )
    # Without the sum of all other ids, which does not scale like a logit.
    scale = _common_factor(actual_RK[:, :-1], expected_RK[:, :-1], most)
    if scale is not None:
        is_sign = abs(scale + 1) <= most
        return (
            "the logits are negated"
            if is_sign
            else f"the logits are {scale:.4g} times the expected logits"
        )
    own_RK = rows_of(observed.most_likely)
    if rms(relative_errors(own_RK, expected_RK[:, :-1])) <= most:
        return "the probabilities are right but belong to other ids: the vocabulary is permuted"
    return None


def _common_factor(actual_RK: Array, expected_RK: Array, most: float) -> float | None:
    """Return the common factor of all logits; None if the remainder exceeds the noise."""
    actual, expected = centred(actual_RK), centred(expected_RK)
    used = np.isfinite(expected)
    square = float(np.sum(expected[used] ** 2))
    if not square:
        return None
    factor = float(np.sum(actual[used] * expected[used])) / square
    left = float(np.sum((actual - factor * expected)[used] ** 2)) / square
    is_factor = left**0.5 <= most * max(abs(factor), 1.0) and abs(factor - 1) > most
    return factor if is_factor else None
