"""The four published metrics by the tool that published them, for its time.

Source of the formulas: scripts/generate_metrics.py of foundation-model-stack/aiu-fms-testing-utils,
where they stand in a script that cannot be imported.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

TOP_K = 20


def published_metrics(actual_TV: Tensor, expected_TV: Tensor) -> None:
    """Compute all four for each token, as the tool does."""
    validation = pytest.importorskip(
        "aiu_fms_testing_utils.testing.validation", reason="`nox -s perf` installs it"
    )
    sides = [[side[token, None] for token in range(len(side))] for side in (expected_TV, actual_TV)]
    for metric in METRICS:
        calculator = validation.top_k_loss_calculator(TOP_K, metric)
        validation.capture_level_1_metrics([sides[0]], [sides[1]], calculator)


def _cross_entropy(expected: Tensor, actual: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(expected, actual.softmax(dim=1))


def _ratio(expected: Tensor, actual: Tensor) -> Tensor:
    return expected.softmax(dim=1) / actual.softmax(dim=1)


def _prob_mean(expected: Tensor, actual: Tensor) -> Tensor:
    return (_ratio(expected, actual) - 1).mean()


def _prob_std(expected: Tensor, actual: Tensor) -> Tensor:
    return _ratio(expected, actual).std()


def _diff_mean(expected: Tensor, actual: Tensor) -> Tensor:
    return (expected.softmax(dim=1) - actual.softmax(dim=1)).abs().mean()


METRICS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    _cross_entropy, _prob_mean, _prob_std, _diff_mean,
)  # fmt: skip
