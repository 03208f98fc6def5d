"""Values of a pair: norms, masks, coarser grids, updates without a sign."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import assay
from assay.comparison.check import CompareOptions, compare_dumps
from assay.comparison.measuring.pair_values import (
    IncomparableError,
    compare_norms,
    excuse_sign_flips,
    give_one_shape,
    measure_coarseness,
)
from assay.comparison.pairing.passes import Pass, PassPair
from assay.dumps.recognizing import open_dump
from assay.recording.recorders import NAMES, measure_statistics, take_values
from assay.runs import SilentProgress
from assay.sites import RowMap
from assay.verdicts import Outcome, Verdict
from packages.core.tests.dump_writers.msprobe import dumped
from packages.core.tests.unit.comparison.memory_dump import make_dump
from packages.core.tests.unit.comparison.small_dumps import judge


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        (2.0, 2.0, 0.0),
        (2.5, 2.0, 0.25),
        (0.0, 0.0, 0.0),
        (1.0, 0.0, math.inf),
        (math.inf, math.inf, 0.0),
        (math.nan, 2.0, math.nan),
        (math.inf, 2.0, math.nan),
        (2.0, math.inf, None),
        (math.nan, math.nan, None),
    ],
)
def test_norms(actual: float, expected: float, error: float | None) -> None:
    found = compare_norms({"norm": actual}, {"norm": expected})
    assert found == pytest.approx(error, nan_ok=True)


def test_infinite_norms_agree_only_with_as_many_infinities() -> None:
    assert compare_norms({"norm": math.inf, "inf": 3.0}, {"norm": math.inf, "inf": 3.0}) == 0.0
    assert compare_norms({"norm": math.inf, "inf": 4.0}, {"norm": math.inf, "inf": 3.0}) is None


def test_a_projection_without_a_number_is_not_a_small_difference() -> None:
    found = compare_norms(
        {"norm": 2.0, "projection": math.nan, "channels": 4.0},
        {"norm": 2.0, "projection": 1.0, "channels": 4.0},
    )
    assert found is not None
    assert math.isnan(found)


def test_tokens_in_another_order_have_another_projection() -> None:
    value = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    measured = [measure_statistics(one) for one in (value, value[torch.randperm(8)])]
    values = take_values(measured)
    both = [dict(zip(NAMES, values[id(one)].tolist(), strict=True)) for one in measured]
    assert (compare_norms(both[1], both[0]) or 0.0) > 0.01
    assert compare_norms(both[1] | {"channels": 2.0}, both[0]) == pytest.approx(0.0, abs=1e-6)


def test_a_capture_of_statistics_keeps_the_dtype_of_its_tensors(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4)).to(torch.bfloat16)
    with assay.capture(model, tmp_path / "trace", stats_only=True):
        model(torch.ones(2, 4, dtype=torch.bfloat16))
    assert {one.dtype for one in open_dump(str(tmp_path / "trace")).tensors} == {"bfloat16"}


CAUSAL = torch.ones(2, 1, 4, 4, dtype=torch.bool).tril()


def additive(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("port", ["input.attention_mask", "input.1"])
@pytest.mark.parametrize(
    ("mask", "outcome"), [(CAUSAL, Outcome.PASS), (torch.ones_like(CAUSAL), Outcome.FAIL)]
)
def test_masks_are_compared_by_what_they_allow(port: str, mask: Tensor, outcome: Outcome) -> None:
    torch.manual_seed(0)
    states = torch.randn(2, 4, 8)
    ids = torch.arange(8).reshape(2, 4)

    def dump_with(value: Tensor) -> dict[tuple[str, str, int], Tensor]:
        return {
            ("embed", "input.0", 0): ids, ("attn", "input.0", 0): states, ("attn", port, 0): value,
            ("attn", "output", 0): 2 * states,
        }  # fmt: skip

    expected, actual = make_dump(dump_with(CAUSAL)), make_dump(dump_with(additive(mask)))
    verdict = compare_dumps(CompareOptions("e", "a"), expected, actual, SilentProgress()).verdict
    assert verdict.verdict is outcome, verdict.levels


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


def test_a_few_reversed_elements_are_excused_and_counted() -> None:
    reference = torch.ones(64, 4)
    update = reference.clone()
    update[5, 2] = -1.0

    excused, count = excuse_sign_flips(update, reference)

    assert count == 1
    assert torch.equal(excused, update)


def test_more_reversed_elements_stay_wrong() -> None:
    reference = torch.ones(64, 4)
    update = reference.clone()
    update[:5, 2] = -1.0

    excused, count = excuse_sign_flips(update, reference)

    assert count == 3
    assert int((excused != update).sum()) == 2


def test_errors_that_no_flip_explains_are_not_excused() -> None:
    reference = torch.ones(64, 4)
    wrong = reference.clone()
    wrong[5, 2] = -1.5
    for update in (reference * 1.1, wrong, torch.full((64, 4), math.nan)):
        excused, count = excuse_sign_flips(update, reference)
        assert (count, excused is reference or torch.equal(excused, reference)) == (0, True)


def test_small_parameters_have_no_excuse() -> None:
    reference = torch.ones(63)
    assert excuse_sign_flips(-reference, reference) == (reference, 0)


# Two prompts of two tokens each.
BATCH = Pass(0, 0, RowMap((0, 1), ((0, 1), (0, 1))))


@pytest.mark.parametrize(
    ("actual", "expected", "shapes"),
    [
        ((2, 2, 3), (2, 2, 3), [(2, 2, 3)] * 2),
        ((4, 3), (2, 2, 3), [(2, 2, 3)] * 2),
        ((2, 2, 1, 3), (4, 3), [(4, 3)] * 2),
        ((1, 4), (3, 4), [(3, 4)] * 2),  # one row for all
        ((2, 2, 3, 1), (2, 2, 3), [(4, 1, 3)] * 2),  # by token
        ((2, 2, 2), (2, 2, 3), None),
        ((3, 3), (2, 2, 3), None),
    ],
)
def test_tensors_of_the_same_tokens_are_compared_in_one_shape(
    actual: tuple[int, ...], expected: tuple[int, ...], shapes: list[tuple[int, ...]] | None
) -> None:
    value, reference = (torch.arange(math.prod(one)).reshape(one) for one in (actual, expected))
    pair = PassPair(BATCH, BATCH)
    if shapes is None:
        words = re.escape(f"its shape is {list(actual)}, expected {list(expected)}")
        with pytest.raises(IncomparableError, match=f"^{words}$"):
            give_one_shape(pair, value, reference, BATCH.rows)
        return
    *both, rows = give_one_shape(pair, value, reference, BATCH.rows)
    assert [one.shape for one in both] == shapes
    assert all(
        torch.equal(one.unique(), side.unique())
        for one, side in zip(both, (value, reference), strict=True)
    )
    by_token = RowMap((0, 0, 1, 1), ((0,), (1,), (0,), (1,)))
    assert rows == (by_token if shapes[0] == (4, 1, 3) else BATCH.rows)
