"""The noise of router scores, measured or derived."""

import math

import torch

from assay.comparing.results import ReplayResults
from assay.offline.expected_noise import measured_score_noise
from assay.offline.measuring.measured import MeasuredPorts
from assay.offline.pairing.port_series import Port
from assay.stages import Stage

ROUTER, OTHER = Port("router", "output"), Port("other", "output")


def test_score_noise_is_the_measured_one_where_there_is_one() -> None:
    expected, rows = torch.zeros(2, 4), torch.arange(2)
    results = ReplayResults()
    port = results.at("router", "output", Stage("router", "forward"), "float32", "")
    port.sums.add(expected + 0.25, expected, rows, rows)
    noise = measured_score_noise(
        MeasuredPorts({("forward", 0, 0): results}), lambda port, scores: math.nan
    )

    assert noise(ROUTER, expected) == 0.25
    assert math.isnan(noise(OTHER, expected))
