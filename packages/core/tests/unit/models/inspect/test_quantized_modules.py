"""Modules of quantization libraries in memory, correct and with faults of a loader, in every format."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from assay.models.inspect.quantized_modules import (
    compare_quantized_modules,
    quantized_modules,
    round_inputs,
)
from assay.models.inspect.report import LoadReport
from assay.models.quantization.dequantizing import DequantizedTensors, dequantize_folder
from assay.models.quantization.quantized_weight import Grid, InputRounding, QuantizedWeight
from assay.models.quantization.stored_weights import open_folder
from assay.models.quantization.weight_formats import list_weights
from packages.core.tests.unit.models.quantization.rounding import Case, no_fault
from packages.core.tests.unit.models.quantization.writers import CASES, write_folder

MODULE = "model.layers.0.mlp.up_proj"
NAME = f"{MODULE}.weight"
ROWS, COLUMNS = 32, 256

Loaded = Callable[[QuantizedWeight], QuantizedWeight]
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


class LibraryLinear(nn.Module):
    """A linear layer as a library keeps it: without `weight`, dequantized in the dtype of its input."""

    def __init__(self, held: QuantizedWeight) -> None:
        super().__init__()
        self.held = held
        self.bias: nn.Parameter | None = nn.Parameter(torch.full((ROWS,), 100.0))

    def forward(self, value: Tensor) -> Tensor:
        rounded = replace(self.held, scales=self.held.scales.to(value.dtype).float())
        product = value @ rounded.dequantize().to(value.dtype).t()
        return product if self.bias is None else product + self.bias.to(value.dtype)


def neighbors_scale(held: QuantizedWeight) -> QuantizedWeight:
    """Give each group the scale of the next one, or a scale 3 % too large if it is the only group."""
    if held.groups.num_groups == 1:
        return replace(held, scales=held.scales * 1.03)
    return replace(held, scales=held.scales.roll(1))


def zero_point(held: QuantizedWeight) -> QuantizedWeight:
    """Shift the zero points of integers, and read floats with the exponent bias of another dtype."""
    if held.grid.is_integer or len(held.grid.levels) <= 16:
        return replace(held, stored_zeros=held.zeros + 1)
    return replace(held, scales=held.scales / 2)


def code_order(held: QuantizedWeight) -> QuantizedWeight:
    """Exchange the halves of each byte of 4 bits: the first code of a pair with the second."""
    return replace(held, codes=held.codes.unflatten(1, (-1, 2)).flip(-1).flatten(1))


def group_order(held: QuantizedWeight) -> QuantizedWeight:
    """Turn around the columns of the codes, as with groups in another order."""
    return replace(held, codes=held.codes.flip(1))


def lost_row(held: QuantizedWeight) -> QuantizedWeight:
    codes = held.codes.clone()
    codes[5] = codes[6]
    return replace(held, codes=codes)


FAULTS = (neighbors_scale, zero_point, code_order, group_order, lost_row)


def inspect(case: Case, folder: Path, dtype: torch.dtype, load: Loaded) -> LoadReport:
    """Compare a folder of one weight with a model whose library read it, and changed it by `load`."""
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)) * 0.02
    tensors, _ = case.write(weight, no_fault)
    write_folder(
        folder, [{f"{MODULE}.{name}": one for name, one in tensors.items()}], case.settings
    )
    store = open_folder(folder)
    (form,) = [one for one in list_weights(store).values() if one is not None]
    model = model_of(LibraryLinear(load(form.read(store, MODULE))))
    stored = dequantize_folder(folder)
    assert stored is not None
    report = LoadReport()
    modules = quantized_modules(model, stored)
    compare_quantized_modules(modules, stored, (dtype, dtype), report)
    return report


def model_of(layer: nn.Module) -> nn.Module:
    for name in reversed(MODULE.split(".")):
        owner = nn.Module()
        owner.add_module(name, layer)
        layer = owner
    return layer


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_modules_with_the_weights_of_their_files_have_no_finding(
    case: Case, dtype: torch.dtype, tmp_path: Path
) -> None:
    report = inspect(case, tmp_path / "model", dtype, lambda held: held)
    assert report == LoadReport(compared=1)


@every_case
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_loader_is_named(case: Case, fault: Loaded, tmp_path: Path) -> None:
    (found,) = inspect(case, tmp_path / "model", torch.bfloat16, fault).weights
    assert found.name == NAME
    assert found.beyond_rounding
    if fault is lost_row and not case.name.startswith("bitsandbytes-"):  # flat: 4 blocks a row
        assert (found.rows, found.num_differing) == ((5, 5), 1)


def test_a_bias_remains_as_it_was(tmp_path: Path) -> None:
    case = CASES["torchao-int8-256"]
    layers = []

    def keep(held: QuantizedWeight) -> QuantizedWeight:
        layers.append(held)
        return held

    assert inspect(case, tmp_path / "model", torch.float32, keep).weights == []
    layer = LibraryLinear(layers[0])
    report = LoadReport()
    stored = DequantizedTensors({NAME: layers[0].dequantize}, {NAME}, None)
    bias = layer.bias
    dtypes = torch.float32, torch.float32
    compare_quantized_modules({NAME: layer}, stored, dtypes, report)
    assert layer.bias is bias


def test_a_module_that_is_absent_or_takes_other_inputs_is_not_compared() -> None:
    stored = DequantizedTensors({NAME: lambda: torch.ones(2, 3)}, {NAME}, None)
    dtypes = torch.float32, torch.float32
    for modules, reason in (
        ({}, "no module of this name"),
        ({NAME: nn.Linear(4, 2)}, "takes no unit vectors"),
        ({NAME: nn.Linear(3, 4)}, "it has [4, 3] values, its files [2, 3]"),
    ):
        report = LoadReport()
        compare_quantized_modules(modules, stored, dtypes, report)
        assert (report.compared, len(report.not_compared)) == (0, 1)
        assert reason in report.not_compared[0]


def test_nan_is_a_finding() -> None:
    stored = DequantizedTensors({NAME: lambda: torch.ones(2, 3)}, {NAME}, None)
    layer = nn.Linear(3, 2, bias=False)
    nn.init.constant_(layer.weight, 1.0)
    layer.weight.data[1, 2] = torch.nan
    report = LoadReport()
    compare_quantized_modules({NAME: layer}, stored, (torch.float32, torch.float32), report)
    assert [one.rows for one in report.weights] == [(1, 1)]


INT8 = Grid.of_signed(-128, 127)


@pytest.mark.parametrize(
    ("rounding", "expected"),
    [
        # 127.5 codes for the largest value of a row, of which 127 remain.
        (InputRounding(INT8), [[0.0, 127 / 127.5], [2 * 64 / 127.5, 2 * 127 / 127.5]]),
        (InputRounding(INT8, 1), [[0.001 * 127 / 127.5, 127 / 127.5], [127 / 127.5, 2 * 127 / 127.5]]),
        (InputRounding(INT8, 0), [[0.0, 2 * 64 / 127.5], [2 * 64 / 127.5, 2 * 127 / 127.5]]),
        (InputRounding(INT8, largest_rounded=1.5), [[0.0, 1.0], [2 * 64 / 127.5, 2.0]]),
        (InputRounding(Grid.of_e2m1()), [[0.0, 1.0], [1.0, 2.0]]),
    ],
    ids=["row", "group", "tensor", "outlier", "float4"],
)  # fmt: skip
def test_inputs_are_rounded_by_hand_computed_steps(
    rounding: InputRounding, expected: list[list[float]]
) -> None:
    rounded = rounding.apply(torch.tensor([[0.001, 1.0], [1.0, 2.0]]))
    torch.testing.assert_close(rounded, torch.tensor(expected))


def test_only_layers_that_round_their_inputs_are_changed() -> None:
    layer = nn.Linear(2, 2, bias=False)
    nn.init.eye_(layer.weight)
    model, value = model_of(layer), torch.tensor([[0.001, 1.0]])
    weight = {NAME: lambda: torch.eye(2)}
    round_inputs(model, DequantizedTensors(weight, {NAME}, None))
    assert torch.equal(layer(value), value)
    round_inputs(model, DequantizedTensors(weight, {NAME}, None, {NAME: InputRounding(INT8)}))
    torch.testing.assert_close(layer(value), torch.tensor([[0.0, 127 / 127.5]]))
