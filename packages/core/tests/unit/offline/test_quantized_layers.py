"""Layers that only one side quantizes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from assay.offline.measuring.pair_values import measure_coarseness
from assay.verdicts import Outcome, Verdict
from packages.core.tests.dump_writers.msprobe import dumped
from packages.core.tests.unit.offline.small_dumps import judge

WIDTH = 64


def round_to_bits(value: Tensor, num_bits: int) -> Tensor:
    """Round every row to integers of this many bits and back."""
    largest = 2 ** (num_bits - 1) - 1
    scale = value.abs().amax(-1, keepdim=True) / largest
    rounded: Tensor = (value / scale).round() * scale
    return rounded


def round_to_fp8(value: Tensor) -> Tensor:
    return value.to(torch.float8_e4m3fn).to(value.dtype)


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "int8": lambda value: round_to_bits(value, 8),
    "int4": lambda value: round_to_bits(value, 4),
    "int8 of a tensor": lambda value: round_to_bits(value.flatten(), 8).reshape(value.shape),
    "fp8": round_to_fp8,
}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        return hidden


def write(folder: Path, change: Callable[[Any], object], *, parameters: bool = True) -> Path:
    torch.manual_seed(1)
    network = Network()
    change(network)
    with torch.no_grad(), dumped(network, folder, parameters=parameters):
        network(torch.randn(1, 16, WIDTH))
    return folder


def compare(tmp_path: Path, change: Callable[[Any], object], *, parameters: bool = True) -> Verdict:
    golden = write(tmp_path / "golden", lambda _: None, parameters=parameters)
    mine = write(tmp_path / "mine", change, parameters=parameters)
    return judge(golden, mine, tmp_path / "out")


def round_weight(rounding: Callable[[Tensor], Tensor]) -> Callable[[Any], object]:
    def change(network: Any) -> None:
        weight = network.layers[1].weight
        weight.data = rounding(weight.data)

    return change


@pytest.mark.parametrize("name", ROUNDINGS)
def test_weights_on_a_grid_are_named(tmp_path: Path, name: str) -> None:
    verdict = compare(tmp_path, round_weight(ROUNDINGS[name]))
    assert verdict.verdict is Outcome.FAIL
    assert str(verdict.headline).startswith("layers.1 is quantized in ACTUAL only: ")
    assert "of the weights in a row are distinct, expected 100%" in str(verdict.headline)
    assert "quantized on one side only (1): layers.1" in verdict.notes


def test_the_side_is_named(tmp_path: Path) -> None:
    golden = write(tmp_path / "golden", round_weight(ROUNDINGS["int4"]))
    verdict = judge(golden, write(tmp_path / "mine", lambda _: None), tmp_path / "out")
    assert str(verdict.headline).startswith("layers.1 is quantized in EXPECTED only: ")


def test_results_on_a_grid_are_named(tmp_path: Path) -> None:
    def change(network: Any) -> None:
        network.layers[1].register_forward_hook(lambda *call: round_to_bits(call[-1], 8))

    verdict = compare(tmp_path, change, parameters=False)
    assert str(verdict.headline).startswith("layers.1 is quantized in ACTUAL only: ")
    assert "of the results in a row are distinct" in str(verdict.headline)


def test_a_weight_that_is_stored_in_8_bits_is_named(tmp_path: Path) -> None:
    def change(network: Any) -> None:
        layer = network.layers[1]
        scale = layer.weight.data.abs().amax() / 127
        codes = (layer.weight.data / scale).round()
        layer.weight.data = codes * scale
        del layer._parameters["weight"]
        layer.register_buffer("dequantized", codes * scale)
        layer.register_parameter("codes", nn.Parameter(codes.to(torch.int8), requires_grad=False))
        layer.forward = lambda hidden: hidden @ layer.dequantized.T + layer.bias

    verdict = compare(tmp_path, change)
    assert verdict.verdict is Outcome.FAIL
    assert verdict.headline == (
        "layers.1 is quantized in ACTUAL only: its weight is stored as int8."
    )


def scale_weight(network: Any) -> None:
    network.layers[1].weight.data *= 1.02


def round_all_to_bfloat16(network: Any) -> None:
    for one in network.parameters():
        one.data = one.data.bfloat16().float()


def zero_some(network: Any) -> None:
    network.layers[1].weight.data[:, ::8] = 0


@pytest.mark.parametrize("change", [scale_weight, round_all_to_bfloat16, zero_some])
def test_other_faults_are_not_reported_as_quantization(
    tmp_path: Path, change: Callable[[Any], object]
) -> None:
    verdict = compare(tmp_path, change)
    assert verdict.verdict is Outcome.FAIL
    assert "quantized" not in str(verdict.headline)


def test_narrow_dtypes_hold_few_values_by_nature() -> None:
    """Values around -10 have 4 distinct values in bfloat16."""
    wide = torch.randn(8, WIDTH) * 0.02 - 10
    found = measure_coarseness((wide + 0.1).bfloat16(), wide)
    assert found is not None
    assert found.side == ""
