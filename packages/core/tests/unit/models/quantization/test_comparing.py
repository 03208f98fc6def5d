"""Two folders: sound weights of every format are no finding, each planted fault is named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.models.quantization.judging import WeightComparison, WeightRegion
from packages.core.tests.unit.models.quantization.rounding import (
    Case,
    Fault,
    Tensors,
    no_fault,
    swap,
    times,
    zero_plus_one,
)
from packages.core.tests.unit.models.quantization.writers import (
    CASES,
    compare_folders,
    write_folder,
)

NAMES = ["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.up_proj"]
FAULTY = "model.layers.0.mlp.down_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
# With 2 bits, one scale that is a tenth too large cannot be told from rounding.
COARSE = "gptq2-256"

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
grouped = pytest.mark.parametrize(
    "case", [one for one in CASES.values() if one.num_groups > 1], ids=lambda case: case.name
)
shifted = pytest.mark.parametrize(
    "case", [one for one in CASES.values() if one.has_zeros], ids=lambda case: case.name
)


def make_weights(seed: int) -> dict[str, Tensor]:
    """Groups of 64 columns have different sizes, and so different scales."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(32, 1, generator=generator) + 0.5
    sizes = sizes * (torch.rand(1, 4, generator=generator) + 0.5).repeat_interleave(64, 1)
    return {name: torch.randn(32, 256, generator=generator) * 0.02 * sizes for name in NAMES}


def write_expected(folder: Path, weights: dict[str, Tensor]) -> Path:
    stored = {f"{name}.weight": weight for name, weight in weights.items()}
    return write_folder(folder, [stored | {NORM: torch.linspace(0.5, 1.5, 256)}])


def write_actual(folder: Path, case: Case, weights: dict[str, Tensor], fault: Fault) -> Path:
    """Two shards: layer 0, and layer 1 with its norm."""
    shards: list[Tensors] = [{}, {NORM: torch.linspace(0.5, 1.5, 256)}]
    for name, weight in weights.items():
        tensors, _ = case.write(weight, fault if f"{name}.weight" == FAULTY else no_fault)
        shards[name == NAMES[2]] |= {f"{name}.{part}": one for part, one in tensors.items()}
    return write_folder(folder, shards, case.settings)


def compare(folder: Path, case: Case, fault: Fault = no_fault) -> WeightComparison:
    weights = make_weights(0)
    expected = write_expected(folder / "expected", weights)
    return compare_folders(expected, write_actual(folder / "actual", case, weights, fault))


def where(place: WeightRegion | None) -> tuple[int, int] | None:
    return (place.rows[0], place.columns[0]) if place else None


@every_case
def test_sound_weights_are_no_finding(case: Case, tmp_path: Path) -> None:
    found = compare(tmp_path, case)
    assert not found.findings
    assert (len(found.results), found.unmatched_expected, found.unmatched_actual) == (4, (), ())
    # A power of two is up to twice the scale that just covers a group, one of fp8 may clip.
    assert max(one.worst_ratio for one in found.results) < (2.6 if case.factor == 2 else 1.6)
    assert [one.error for one in found.results if one.name == NORM] == [0.0]


@every_case
def test_one_wrong_scale_is_named_with_its_factor(case: Case, tmp_path: Path) -> None:
    factor = 1.5 if case.name == COARSE else case.factor
    found = compare(tmp_path, case, times(factor, case.group))
    assert [(one.cause, one.weight) for one in found.findings] == [("scale", FAULTY)]
    finding = found.findings[0]
    assert finding.amount == pytest.approx(factor, rel=0.3 if case.name == COARSE else 0.06)
    assert finding.error > finding.best
    assert where(finding.place) == (None if case.num_groups == 1 else case.corner(case.group))


def test_a_wrong_scale_that_cannot_be_seen_is_below_the_resolution(tmp_path: Path) -> None:
    found = compare(tmp_path, CASES[COARSE], times(1.1, 3))
    assert not found.findings
    assert next(one.resolution for one in found.results if one.name == FAULTY) > 0.1


@shifted
def test_one_zero_point_that_is_off_by_one_is_named(case: Case, tmp_path: Path) -> None:
    found = compare(tmp_path, case, zero_plus_one(case.group))
    assert [(one.cause, one.weight) for one in found.findings] == [("zero-point", FAULTY)]
    assert found.findings[0].amount == pytest.approx(1, abs=0.02)
    assert where(found.findings[0].place) == case.corner(case.group)


@grouped
def test_swapped_groups_name_each_other(case: Case, tmp_path: Path) -> None:
    found = compare(tmp_path, case, swap(1, 4))
    assert {(one.cause, one.weight) for one in found.findings} == {("swapped", FAULTY)}
    pairs = {(where(one.place), where(one.partner)) for one in found.findings}
    here, there = case.corner(1), case.corner(4)
    assert pairs == {(here, there), (there, here)}


@every_case
def test_stale_shard_is_named_once(case: Case, tmp_path: Path) -> None:
    weights, stale = make_weights(0), make_weights(1)
    mixed = {name: (weights if name == NAMES[2] else stale)[name] for name in NAMES}
    expected = write_expected(tmp_path / "expected", weights)
    found = compare_folders(expected, write_actual(tmp_path / "actual", case, mixed, no_fault))
    assert [(one.cause, one.weight, one.amount) for one in found.findings] == [
        ("shard", "model-00001-of-00002.safetensors", 2)
    ]


def test_scale_and_zero_point_of_two_groups_exchanged(tmp_path: Path) -> None:
    def exchange(rounded: Any) -> None:
        for per_group in (rounded.scales, rounded.zeros):
            flat = per_group.view(-1)
            flat[[1, 4]] = flat[[4, 1]]

    found = compare(tmp_path, CASES["gptq8-64"], exchange)
    assert {one.cause for one in found.findings} == {"swapped-parameters"}
    assert {where(one.partner) for one in found.findings} == {(0, 64), (1, 0)}


def test_every_zero_point_off_by_one_is_one_finding(tmp_path: Path) -> None:
    """As where a file of the second version of GPTQ's format is read as one of the first."""
    case = CASES["gptq4-64"]
    weights = make_weights(0)
    actual = write_actual(tmp_path / "actual", case, weights, no_fault)
    config = actual / "config.json"
    config.write_text(config.read_text().replace('"gptq"}', '"gptq_v2"}'))
    found = compare_folders(write_expected(tmp_path / "expected", weights), actual)
    assert {(one.cause, one.place) for one in found.findings} == {("zero-point", None)}
    assert [one.amount for one in found.findings] == [pytest.approx(-1, abs=0.02)] * 3


def test_every_scale_too_large_is_one_finding(tmp_path: Path) -> None:
    def enlarge(rounded: Any) -> None:
        rounded.scales *= 1.1

    [finding] = compare(tmp_path, CASES["gptq4-64"], enlarge).findings
    assert (finding.cause, finding.place) == ("scale", None)
    assert finding.amount == pytest.approx(1.1, rel=0.02)


def test_nan_in_a_scale_is_a_finding(tmp_path: Path) -> None:
    [finding] = compare(tmp_path, CASES["compressed-int8-group"], times(float("nan"), 3)).findings
    assert (finding.cause, where(finding.place)) == ("values", (0, 192))


def test_a_changed_float_weight_in_a_quantized_folder(tmp_path: Path) -> None:
    case, weights = CASES["gptq4-64"], make_weights(0)
    tensors, _ = case.write(weights[NAMES[0]], no_fault)
    stored = {f"{NAMES[0]}.{part}": one for part, one in tensors.items()}
    norm = torch.linspace(0.5, 1.5, 256)
    expected = {f"{NAMES[0]}.weight": weights[NAMES[0]], NORM: norm}
    changed = norm.clone()
    changed[7] += 1e-3
    found = compare_folders(
        write_folder(tmp_path / "expected", [expected]),
        write_folder(tmp_path / "actual", [stored | {NORM: changed}], case.settings),
    )
    [finding] = found.findings
    assert (finding.weight, finding.cause, finding.place) == (
        NORM,
        "values",
        WeightRegion(range(7, 8), ()),
    )


def test_float_weights_of_two_dtypes_may_differ_by_rounding(tmp_path: Path) -> None:
    weights = make_weights(0)
    half = {name: weight.bfloat16() for name, weight in weights.items()}
    expected = write_expected(tmp_path / "expected", weights)
    assert not compare_folders(expected, write_expected(tmp_path / "actual", half)).findings
    half[NAMES[0]] = half[NAMES[0]] * 1.05
    [finding] = compare_folders(expected, write_expected(tmp_path / "other", half)).findings
    assert finding.cause == "scale"
    assert finding.amount == pytest.approx(1.05, abs=2e-3)


def test_the_quantized_side_may_be_the_expected_one(tmp_path: Path) -> None:
    weights = make_weights(0)
    floats = write_expected(tmp_path / "floats", weights)
    case = CASES["gptq8-64"]
    quantized = write_actual(tmp_path / "quantized", case, weights, times(1.1, 3))
    [finding] = compare_folders(quantized, floats).findings
    assert (finding.weight, finding.cause) == (FAULTY, "scale")


def test_missing_weight_is_unmatched(tmp_path: Path) -> None:
    weights = make_weights(0)
    expected = write_expected(tmp_path / "expected", weights)
    del weights[NAMES[0]]
    found = compare_folders(
        expected, write_actual(tmp_path / "actual", CASES["awq"], weights, no_fault)
    )
    assert (found.unmatched_expected, found.unmatched_actual) == ((f"{NAMES[0]}.weight",), ())


def test_other_shape_is_not_compared(tmp_path: Path) -> None:
    one = write_folder(tmp_path / "one", [{"a.weight": torch.ones(4, 8)}])
    other = write_folder(tmp_path / "other", [{"a.weight": torch.ones(5, 8)}])
    found = compare_folders(one, other)
    assert found.not_compared == ("a.weight (expected (4, 8), actual (5, 8))",)
    assert not found.results


@pytest.mark.parametrize(
    "name", ["gptq4-64", "bitsandbytes-nf4", "fp8-rows", "compressed-pack4-group"]
)
def test_fused_weights_are_compared_with_their_parts(name: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    parts = {
        kind: torch.randn(rows, 256, generator=generator)
        for kind, rows in (("q", 32), ("k", 16), ("v", 16))
    }
    parent = "model.layers.0.self_attn"
    case = CASES[name]

    def stored(name: str, weight: Tensor, fault: Fault) -> Tensors:
        tensors, _ = case.write(weight, fault)
        return {f"{parent}.{name}.{part}": one for part, one in tensors.items()}

    whole = torch.cat(list(parts.values()))
    split = {f"{parent}.{kind}_proj.weight": weight for kind, weight in parts.items()}
    fused = write_folder(
        tmp_path / "fused", [stored("qkv_proj", whole, times(1.5, case.group))], case.settings
    )
    found = compare_folders(write_folder(tmp_path / "split", [split]), fused)
    names = " + ".join(split)
    assert (found.unmatched_expected, found.unmatched_actual) == ((), ())
    assert [(one.weight, one.cause) for one in found.findings] == [(names, "scale")]

    shard: Tensors = {}
    for kind, weight in parts.items():
        shard |= stored(f"{kind}_proj", weight, times(1.5, case.group) if kind == "k" else no_fault)
    actual = write_folder(tmp_path / "parts", [shard], case.settings)
    expected = write_folder(tmp_path / "whole", [{f"{parent}.qkv_proj.weight": whole}])
    found = compare_folders(expected, actual)
    assert [(one.weight, one.cause) for one in found.findings] == [
        (f"{parent}.k_proj.weight", "scale")
    ]


BLOCK = "model.layers.0"
WIDTH, INNER = 64, 128


class Layer:
    """The weights of one block, before and after each channel is scaled as AWQ does."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def factors(size: int) -> Tensor:
            return torch.exp(0.4 * torch.randn(size, generator=generator))

        shapes = {
            **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (WIDTH, WIDTH)),
            "self_attn.o_proj": (WIDTH, WIDTH), "mlp.gate_proj": (INNER, WIDTH),
            "mlp.up_proj": (INNER, WIDTH), "mlp.down_proj": (WIDTH, INNER),
        }  # fmt: skip
        self.linears = {
            name: 0.05 * torch.randn(shape, generator=generator) for name, shape in shapes.items()
        }
        self.norms = {
            name: 1 + 0.1 * torch.randn(WIDTH, generator=generator)
            for name in ("input_layernorm", "post_attention_layernorm")
        }
        self.scaled = {name: weight.clone() for name, weight in self.linears.items()}
        self.scaled_norms = {name: weight.clone() for name, weight in self.norms.items()}
        for norm, readers in (
            ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            scale = factors(WIDTH)
            self.scaled_norms[norm] /= scale
            for reader in readers:
                self.scaled[reader] *= scale
        for writer, reader in (
            ("self_attn.v_proj", "self_attn.o_proj"),
            ("mlp.up_proj", "mlp.down_proj"),
        ):
            scale = factors(len(self.linears[writer]))
            self.scaled[writer] /= scale[:, None]
            self.scaled[reader] *= scale

    def compare(self, folder: Path, fault: Fault = no_fault) -> WeightComparison:
        """Compare the block with its scaled form, quantized by AWQ; `fault` is one of gate_proj."""
        case = CASES["awq"]
        plain = {**self.linears, **self.norms}
        actual: Tensors = {
            f"{BLOCK}.{name}.weight": one.half() for name, one in self.scaled_norms.items()
        }
        for name, weight in self.scaled.items():
            tensors, _ = case.write(
                weight.half().float(), fault if name == "mlp.gate_proj" else no_fault
            )
            actual |= {f"{BLOCK}.{name}.{part}": one for part, one in tensors.items()}
        return compare_folders(
            write_folder(
                folder / "expected",
                [{f"{BLOCK}.{name}.weight": one.half() for name, one in plain.items()}],
            ),
            write_folder(folder / "actual", [actual], case.settings),
        )


def test_scales_that_are_taken_back_are_no_finding(tmp_path: Path) -> None:
    found = Layer().compare(tmp_path)
    assert not found.findings
    assert all(one.is_rescaled for one in found.results)
    assert max(one.error for one in found.results if one.num_groups > 1) < 0.12


def test_wrong_scale_of_a_group_is_found_all_the_same(tmp_path: Path) -> None:
    [finding] = Layer().compare(tmp_path, times(1.3, 3)).findings
    assert (finding.weight, finding.cause) == (f"{BLOCK}.mlp.gate_proj.weight", "scale")
    assert finding.place == WeightRegion(range(3, 4), tuple(range(64)))


def test_one_channel_that_is_not_taken_back(tmp_path: Path) -> None:
    layer = Layer()
    layer.scaled_norms["post_attention_layernorm"][5] *= 1.3
    [finding] = layer.compare(tmp_path).findings
    assert finding.weight == f"{BLOCK}.post_attention_layernorm.weight"
    assert finding.place == WeightRegion(range(5, 6), ())


def test_scales_that_no_weight_takes_back(tmp_path: Path) -> None:
    layer = Layer()
    layer.scaled_norms["input_layernorm"] = layer.norms["input_layernorm"]
    found = layer.compare(tmp_path)
    # What v_proj hands on to o_proj cannot be told from it either.
    assert {one.weight for one in found.findings} - {f"{BLOCK}.self_attn.o_proj.weight"} == {
        f"{BLOCK}.self_attn.{name}_proj.weight" for name in ("q", "k", "v")
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_listed", [True, False])
def test_int8_codes_may_be_rounded_from_products_in_16_bits(
    dtype: torch.dtype, is_listed: bool, tmp_path: Path
) -> None:
    """bitsandbytes 0.50 multiplies a 16-bit weight by 127 / its largest value in that dtype."""
    weight = make_weights(2)[NAMES[0]].to(dtype)
    largest = weight.abs().amax(1, keepdim=True)
    codes = (weight * (127 / largest)).round().clamp(-127, 127)
    stored = {"weight": codes.to(torch.int8), "SCB": largest[:, 0].float()}
    settings: dict[str, Any] = {"quant_method": "bitsandbytes"}

    def found(tensors: Tensors, name: str) -> tuple[Any, ...]:
        shard = {f"{NAMES[0]}.{part}": one for part, one in tensors.items()}
        actual = write_folder(tmp_path / name, [shard], settings)
        if not is_listed:  # the original is float32, and config.json names the dtype
            config = json.loads((actual / "config.json").read_text())
            config["dtype"] = str(dtype).removeprefix("torch.")
            (actual / "config.json").write_text(json.dumps(config))
        return compare_folders(expected, actual).findings

    original = {f"{NAMES[0]}.weight": weight if is_listed else weight.float()}
    expected = write_folder(tmp_path / "expected", [original])
    assert found(stored, "sound") == ()
    scales = stored["SCB"].clone()
    scales[5] *= 1.05
    [finding] = found(stored | {"SCB": scales}, "scaled")
    assert (finding.cause, where(finding.place)) == ("scale", (5, 0))
    wrong = stored["weight"].clone()
    wrong[9, ::3] += 1
    [finding] = found(stored | {"weight": wrong}, "coded")
    assert where(finding.place) == (9, 0)


def test_fp8_codes_may_be_rounded_from_quotients_in_bfloat16(tmp_path: Path) -> None:
    """llm-compressor 0.14 divides a bfloat16 weight by a bfloat16 scale before it rounds."""
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(4)).bfloat16()
    scales = weight.abs().amax(1, keepdim=True) / 448
    shard = {"weight": (weight / scales).to(torch.float8_e4m3fn), "weight_scale": scales}
    settings = CASES["compressed-float8-channel"].settings
    expected = write_folder(tmp_path / "expected", [{f"{NAMES[0]}.weight": weight}])

    def found(name: str) -> tuple[Any, ...]:
        tensors = {f"{NAMES[0]}.{part}": one for part, one in shard.items()}
        return compare_folders(
            expected, write_folder(tmp_path / name, [tensors], settings)
        ).findings

    assert found("sound") == ()
    shard["weight_scale"] = scales.clone()
    shard["weight_scale"][100] *= 1.05
    [finding] = found("scaled")
    assert (finding.cause, where(finding.place)) == ("scale", (100, 0))


def test_a_zero_point_may_be_added_in_bfloat16(tmp_path: Path) -> None:
    """llm-compressor 0.14 adds the zero point to a bfloat16 quotient, which it rounds again."""
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(6)).bfloat16() + 1.5
    low, high = weight.amin(1, keepdim=True).clamp(max=0), weight.amax(1, keepdim=True)
    scales = ((high - low) / 255).float().bfloat16()
    zeros = (-128 - low / scales).round().clamp(-128, 127)
    codes = (weight / scales + zeros).round().clamp(-128, 127)
    shard = {"weight": codes, "weight_zero_point": zeros, "weight_scale": scales}
    settings = CASES["compressed-int8-channel-zeros"].settings
    expected = write_folder(tmp_path / "expected", [{f"{NAMES[0]}.weight": weight}])

    def found(name: str) -> tuple[Any, ...]:
        tensors = {
            f"{NAMES[0]}.{part}": one if part == "weight_scale" else one.to(torch.int8)
            for part, one in shard.items()
        }
        return compare_folders(
            expected, write_folder(tmp_path / name, [tensors], settings)
        ).findings

    assert found("sound") == ()
    zeros[100] += 1
    [finding] = found("shifted")
    assert (finding.cause, where(finding.place)) == ("zero-point", (100, 0))


def test_nested_scales_of_uneven_blocks_are_as_precise_as_their_table(tmp_path: Path) -> None:
    """One row is 5 times as large, so that the scales of the others have few codes."""
    case, weights = CASES["bitsandbytes-nf4-nested"], make_weights(5)
    for weight in weights.values():
        weight[3] *= 5
    expected = write_expected(tmp_path / "expected", weights)
    sound = write_actual(tmp_path / "actual", case, weights, no_fault)
    assert not compare_folders(expected, sound).findings
    wrong = write_actual(tmp_path / "wrong", case, weights, times(1.3, 13))  # a group of row 3
    [finding] = compare_folders(expected, wrong).findings
    assert (finding.weight, where(finding.place)) == (FAULTY, (3, 64))
