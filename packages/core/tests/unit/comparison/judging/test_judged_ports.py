"""Expected noise, and noise of channels."""

import math

import torch
from torch import Tensor

from assay.comparison.check import CompareOptions, compare_dumps
from assay.comparison.measuring.pair_measurer import MeasuredPorts, measured_score_noise
from assay.comparison.pairing.port_series import Port
from assay.dumps.protocol import Dump
from assay.runs import SilentProgress
from assay.verdicts import Outcome, Verdict
from packages.core.tests.unit.comparison.memory_dump import make_dump

ROUTER, OTHER = Port("router", "output"), Port("other", "output")


def test_score_noise_is_the_measured_one_where_there_is_one() -> None:
    expected, rows = torch.zeros(2, 4), torch.arange(2)
    measured = MeasuredPorts()
    measured.at(ROUTER, 0, 0, expected, "").sums.add(expected + 0.25, expected, rows, rows)
    noise = measured_score_noise(measured, lambda port, scores: math.nan)

    assert noise(ROUTER, expected) == 0.25
    assert math.isnan(noise(OTHER, expected))


NOISE = 1e-3
TOKEN, CHANNEL = 5, 23


def dump(value: Tensor) -> Dump:
    return make_dump({("layer", "output", 0): value})


def values() -> tuple[Tensor, Tensor, Tensor]:
    """Return the values of EXPECTED, the noise dump and ACTUAL. One token dominates a channel."""
    torch.manual_seed(0)
    expected = torch.randn(128, 64)
    expected[TOKEN, CHANNEL] = 60.0
    noise, actual = (expected * (1 + NOISE * torch.randn(128, 64)) for _ in range(2))
    noise[TOKEN, CHANNEL] = expected[TOKEN, CHANNEL] * (1 + NOISE / 50)  # exact by chance
    actual[TOKEN, CHANNEL] = expected[TOKEN, CHANNEL] * (1 + NOISE)
    return expected, noise, actual


def judge(expected: Tensor, noise: Tensor, actual: Tensor) -> Verdict:
    comparison = CompareOptions("", "", noise="noise")
    dumps = dump(expected), dump(actual), SilentProgress(), dump(noise)
    return compare_dumps(comparison, *dumps).verdict


def test_a_channel_that_is_exact_by_chance_in_the_noise_dump_does_not_fail() -> None:
    verdict = judge(*values())
    assert verdict.verdict is Outcome.PASS, (verdict.statistic, verdict.noise_ratio)


def test_a_scaled_channel_fails() -> None:
    expected, noise, actual = values()
    actual[:, 7] *= 1 + 4 * NOISE
    verdict = judge(expected, noise, actual)
    assert verdict.verdict is Outcome.FAIL
    assert verdict.statistic == "replay-channel"
